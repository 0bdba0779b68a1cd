"""Programs that are sent to hosts and run there by whatever Python 3.8 or later they have; standard library only."""
