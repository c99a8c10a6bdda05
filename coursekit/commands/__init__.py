"""The commands of the course, one module each, in the form of those of `minipaged.commands`."""
