"""Where the work runs: here, one worker in this process."""
