"""A few unlabelled inputs of an expert: read them, run the expert, and keep statistics of what its layers see."""
