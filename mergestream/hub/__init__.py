"""Exports and stores on the Hugging Face hub: pushed in one commit, pulled and checked before they count."""
