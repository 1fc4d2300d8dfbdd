"""The T5X dialect: gin files and --gin.MACRO=VALUE overrides in, typed records out."""
