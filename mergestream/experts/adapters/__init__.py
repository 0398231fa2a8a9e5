"""Adapters as experts: plain LoRAs in factors, and the adapters that PEFT merges; see docs/how-to/adapters.md."""
