//! Configuration of a registrar and of a pool daemon: TOML files in which every key is optional.

mod life_unit;
mod optional_keys;
pub mod pool;
pub mod registrar;
mod sctp_section;

use std::path::Path;

use holdfast_daemon::config::{ConfigError, ConfigFile};

/// Returns the content of an optional file that is named.
///
/// # Errors
/// The file cannot be read.
fn read_optional_file(path: &Path) -> Result<String, ConfigError> {
    ConfigFile::read(
        path,
        "name an existing file with --config, or omit --config: every key has a default",
    )
}
