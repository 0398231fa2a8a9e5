"""Runners for the peers, executed by an interpreter of their own (`make peers`)."""
