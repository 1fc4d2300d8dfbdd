"""The T5X dialect: parses gin files and --gin.MACRO=VALUE overrides into the calls of a program."""
