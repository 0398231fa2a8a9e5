"""Linear algebra: pieces, matrices in factors, decompositions, thresholds. It knows nothing about files or merging."""
