//! Random and mutated input for every parser; see README.md.
#![forbid(unsafe_code)]

pub mod app;
pub mod arena;
pub mod conversation;
pub mod driver;
pub mod flow;
pub mod frame;
pub mod handoff;
pub mod image;
mod mutate;
pub mod packet;
pub mod pool;
pub mod registrar;
pub mod rserpool;
pub mod state;
pub mod stream;
pub mod vdso;
pub mod vnet;
