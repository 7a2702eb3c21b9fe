//! The descriptors of a tree: first all of them, then the changes.

use super::Validate;
use crate::process::error::{Error, Result};
use crate::process::files::image::{FileId, OpenFile, limits};
use crate::process::files::{Changes, Image};
use crate::process::sockets::SocketStatic;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Result of reading a tree's descriptors.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Descriptors {
    /// Open files, and the descriptors that refer to them.
    pub files: Files,
    /// TCP and UDP sockets that are new, or differ from the last read.
    pub sockets: BTreeMap<FileId, SocketStatic>,
    /// Sockets that no longer exist.
    pub removed: BTreeSet<FileId>,
}

/// The open files of a tree.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Files {
    /// All of them.
    Image(Image),
    /// Differences from the last read.
    Changes(Changes),
}

impl Files {
    /// Returns the open files that are new, or differ from the last read.
    pub fn new_files(&self) -> impl Iterator<Item = &OpenFile> {
        let (all_files, changed_files) = match self {
            Self::Image(image) => (Some(image.files.values()), None),
            Self::Changes(changes) => (None, Some(changes.files())),
        };
        all_files
            .into_iter()
            .flatten()
            .chain(changed_files.into_iter().flatten())
    }
}

impl Validate for Descriptors {
    fn check(&self) -> Result<()> {
        self.files.check()
    }
}

impl Validate for Files {
    fn check(&self) -> Result<()> {
        match self {
            Self::Image(image) => {
                limits::check(image).map_err(|_| Error::Image("inconsistent open files"))
            }
            // `Image::apply` checks changes together with the image that they lead to.
            Self::Changes(_) => Ok(()),
        }
    }
}
