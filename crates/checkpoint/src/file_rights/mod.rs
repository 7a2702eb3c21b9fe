//! Rights of an incoming tree to open files at this machine.
//!
//! A donor names the files that a tree has open, and may only send processes of certain users: a file that none
//! of these users could open here is refused. The kernel makes the decision: a deputy, a process with the identity of
//! such a user, opens the file. So there is no gap between check and open.

mod deputy;
mod opener;

pub(crate) use opener::{FileOpener, FileOwnerAndMode, is_refusal};

use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};

/// Identity of a process that opens files, as the kernel sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct UserIdentity {
    /// Filesystem user.
    pub user: u32,
    /// Filesystem group.
    pub group: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
}

/// Rights of an incoming tree to open files.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum FileRights {
    /// Root's rights, because root's processes are accepted.
    #[default]
    Root,
    /// The rights of these identities, and files below these directories.
    Limited {
        /// Identities: the tree may open the files that one of them may open.
        identities: BTreeSet<UserIdentity>,
        /// Directories: the tree may open all files below them, without symbolic links on the way.
        directories: Vec<PathBuf>,
    },
}

impl FileRights {
    /// Returns true if root's rights apply to this path.
    pub(crate) fn is_exempt(&self, path: &Path) -> bool {
        let Self::Limited {
            directories: files, ..
        } = self
        else {
            return true;
        };
        let has_no_parent_parts = path.components().all(|part| part != Component::ParentDir);
        has_no_parent_parts && files.iter().any(|directory| path.starts_with(directory))
    }

    fn identities(&self) -> impl Iterator<Item = &UserIdentity> {
        let whose = match self {
            Self::Root => None,
            Self::Limited {
                identities: whose, ..
            } => Some(whose),
        };
        whose.into_iter().flatten()
    }
}

#[cfg(test)]
mod tests;
