//! Configuration files: TOML, read once at start. Every error names the file, the line, the key and the remedy.

mod error;
mod file;
mod sections;

pub use error::ConfigError;
pub use file::ConfigFile;
pub use sections::{
    LogConfig, LogConfigSection, LogFormat, MetricsConfigSection, TlsConfig, TlsConfigSection,
};
