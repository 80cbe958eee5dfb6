"""What an ExpertParallel will hold, send and take, before there is one: `thinwire plan`."""
