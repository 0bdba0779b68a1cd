"""The endpoints of the REST API, a module for each kind of object."""
