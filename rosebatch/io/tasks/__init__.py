"""What a job makes of its prompts: a task is a file of this folder."""
