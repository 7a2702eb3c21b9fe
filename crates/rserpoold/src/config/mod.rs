//! Configuration of a registrar and of a pool daemon: TOML files in which every key is optional.

mod optional_keys;
pub mod pool;
pub mod registrar;
mod sctp_section;
