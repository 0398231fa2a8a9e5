"""Does the merged model still do every task? Suites, metrics and the benchmark of the paper's section 5."""
