"""What a step has done, sent to where people follow their experiments: one file a tracker."""
