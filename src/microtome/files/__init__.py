"""Files that anybody may have written, and folders that anybody may have prepared."""
