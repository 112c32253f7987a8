"""The version: read by the build, the reports and the command line."""

__version__ = "0.2.0"
