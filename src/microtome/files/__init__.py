"""Read and write files, none of whose content or folder is trusted."""
