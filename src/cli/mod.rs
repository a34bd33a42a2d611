//! Adapter: the command line, one file for each command.
