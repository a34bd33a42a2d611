//! What integration tests share. Each test program uses a part of it.
#![allow(dead_code)]

pub mod fake_http;
pub mod registry_process;
