//! The descriptors of a tree: first all of them, then the changes.

use super::Validate;
use crate::error::{Error, Result};
use crate::files::image::{FileId, OpenFile, limits};
use crate::files::{FilesImage, FilesImageChanges};
use crate::sockets::SocketStaticState;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Result of reading a tree's descriptors.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DescriptorUpdate {
    /// Open files, and the descriptors that refer to them.
    pub files: OpenFilesUpdate,
    /// TCP and UDP sockets that are new, or differ from the last read.
    pub sockets: BTreeMap<FileId, SocketStaticState>,
    /// Sockets that no longer exist.
    pub removed: BTreeSet<FileId>,
}

/// The open files of a tree.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum OpenFilesUpdate {
    /// All open files of the tree.
    Image(FilesImage),
    /// Differences from the last read.
    Changes(FilesImageChanges),
}

impl OpenFilesUpdate {
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

impl Validate for DescriptorUpdate {
    fn check(&self) -> Result<()> {
        self.files.check()
    }
}

impl Validate for OpenFilesUpdate {
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
