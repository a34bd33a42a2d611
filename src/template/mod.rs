//! Pure: Dockerfile templates, rendered strictly.
