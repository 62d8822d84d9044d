"""The built-in tasks, one module each; `gatelens.tasks.TASKS` lists them."""
