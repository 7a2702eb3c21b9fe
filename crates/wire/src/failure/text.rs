//! Data of failures that comes from libraries and kernels: bounded texts, and errors of system calls.

use serde::{Deserialize, Deserializer, Serialize};
use std::borrow::Cow;
use std::{fmt, io};

/// Maximum length of a text, in bytes. A longer one is cut and ends with an ellipsis.
pub const TEXT_BYTES_MAX: usize = 4096;

/// The end of a text that was cut.
const ELLIPSIS: &str = "…";

/// A text of at most [`TEXT_BYTES_MAX`] bytes: a name, a path, or an explanation from a library.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct Text(Cow<'static, str>);

impl Text {
    /// Returns the text as a string slice.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the text of a value.
    pub fn of(value: impl fmt::Display) -> Text {
        value.to_string().into()
    }
}

impl fmt::Display for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl From<&'static str> for Text {
    /// Texts of the program itself are short.
    fn from(text: &'static str) -> Text {
        Text(Cow::Borrowed(text))
    }
}

impl From<String> for Text {
    fn from(mut text: String) -> Text {
        if text.len() > TEXT_BYTES_MAX {
            let mut end = TEXT_BYTES_MAX - ELLIPSIS.len();
            while !text.is_char_boundary(end) {
                end -= 1;
            }
            text.truncate(end);
            text.push_str(ELLIPSIS);
        }
        Text(Cow::Owned(text))
    }
}

impl<'de> Deserialize<'de> for Text {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Text, D::Error> {
        String::deserialize(deserializer).map(Text::from)
    }
}

/// The error of a system call, as it can be sent to another node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum SystemError {
    /// An error number (`errno`).
    Code(i32),
    /// The explanation of an error that has no number.
    Text(Text),
}

impl From<&io::Error> for SystemError {
    fn from(error: &io::Error) -> SystemError {
        match error.raw_os_error() {
            Some(code) => SystemError::Code(code),
            None => SystemError::Text(Text::of(error)),
        }
    }
}

impl fmt::Display for SystemError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SystemError::Code(code) => io::Error::from_raw_os_error(*code).fmt(f),
            SystemError::Text(text) => text.fmt(f),
        }
    }
}
