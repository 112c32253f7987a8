"""The batch files of OpenAI's API. ``lines`` reads and writes a line; each endpoint has a file of its own."""
