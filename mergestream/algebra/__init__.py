"""The linear algebra: pieces, matrices in factors, decompositions, thresholds. Nothing of files or of merging."""
