"""Jobs on hosts that share nothing: which hosts, what goes there, how they are followed, and what is removed."""
