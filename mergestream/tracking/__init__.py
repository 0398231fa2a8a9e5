"""Send the numbers of each step to experiment trackers: one file per tracker."""
