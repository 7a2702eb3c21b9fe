//! A configuration file with its text, so that errors can name lines and keys.

use std::ops::Range;
use std::path::Path;

use serde::de::DeserializeOwned;
use toml::Spanned;

use super::ConfigError;

/// A file that is being checked.
#[derive(Debug, Clone, Copy)]
pub struct ConfigFile<'a> {
    path: &'a Path,
    text: &'a str,
}

impl<'a> ConfigFile<'a> {
    /// Returns a file with this content. Relative paths in the file are relative to the directory of `path`.
    pub fn new(path: &'a Path, text: &'a str) -> ConfigFile<'a> {
        ConfigFile { path, text }
    }

    /// Returns the content of the file at `path`.
    ///
    /// # Errors
    /// The file cannot be read; the error's remedy is `what_to_do`.
    pub fn read(path: &Path, what_to_do: &str) -> Result<String, ConfigError> {
        std::fs::read_to_string(path).map_err(|error| {
            ConfigError::for_file(path, format!("cannot be read: {error}"), what_to_do)
        })
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &'a Path {
        self.path
    }

    /// Returns the file's keys as written.
    ///
    /// # Errors
    /// The text is not TOML, or has an unknown or missing key or a value of another type.
    pub fn parse<T: DeserializeOwned>(&self) -> Result<T, ConfigError> {
        toml::from_str(self.text)
            .map_err(|error| ConfigError::from_toml(self.path, self.text, &error))
    }

    /// Returns an error that names the place of a value in the file.
    pub fn error_for<T>(
        &self,
        value: &Spanned<T>,
        problem: String,
        what_to_do: &str,
    ) -> ConfigError {
        self.error_at(value.span(), problem, what_to_do)
    }

    /// Returns an error at the bytes `span` of the text.
    pub fn error_at(&self, span: Range<usize>, problem: String, what_to_do: &str) -> ConfigError {
        ConfigError::at(self.path, self.text, span, problem, what_to_do)
    }
}
