//! Checks `[migration]`.

use std::path::PathBuf;

use toml::Spanned;

use super::super::sections::MigrationConfigSection;
use super::super::{ConfigError, MigrationConfig, SocketFamily};
use super::ConfigChecker;

impl ConfigChecker<'_> {
    pub(super) fn migration(
        &self,
        raw: MigrationConfigSection,
    ) -> Result<MigrationConfig, ConfigError> {
        Ok(MigrationConfig {
            enabled: raw.enabled,
            users: raw.users,
            groups: raw.groups,
            paths: self.directories(raw.paths)?,
            files: self.directories(raw.files)?,
            ports: raw.ports,
            families: raw.families.unwrap_or(SocketFamily::ALL.into()),
        })
    }

    fn directories(&self, paths: Vec<Spanned<PathBuf>>) -> Result<Vec<PathBuf>, ConfigError> {
        let absolute = |path: Spanned<PathBuf>| match path.get_ref().is_absolute() {
            true => Ok(path.into_inner()),
            false => {
                let problem = format!("{} is not an absolute path", path.get_ref().display());
                Err(self
                    .file
                    .error_for(&path, problem, "write the path from the root directory"))
            }
        };
        paths.into_iter().map(absolute).collect()
    }
}
