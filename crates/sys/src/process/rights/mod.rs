//! What a tree that comes may open at this machine.
//!
//! A donor says which files a tree has open, and is believed only as far as those go whose processes it may send: what none of
//! them could open here themselves is refused. The kernel decides that, not we: a deputy opens it, a process that is one of
//! them. So there is no moment between looking and opening.

mod deputy;
mod opener;

pub(in crate::process) use opener::{Access, Opener, is_refusal};

use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};

/// Who opens files, as the kernel sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Identity {
    /// Filesystem user.
    pub user: u32,
    /// Filesystem group.
    pub group: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
}

/// What a tree that comes may open.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Rights {
    /// What root may: its processes may come.
    #[default]
    All,
    /// No more than others may.
    Of {
        /// What one of these may …
        whose: BTreeSet<Identity>,
        /// … and what is below these, without symbolic links on the way.
        files: Vec<PathBuf>,
    },
}

impl Rights {
    /// Whether root's rights are at hand for what is at this path.
    pub(in crate::process) fn exempts(&self, path: &Path) -> bool {
        let Self::Of { files, .. } = self else {
            return true;
        };
        let plain = path.components().all(|part| part != Component::ParentDir);
        plain && files.iter().any(|directory| path.starts_with(directory))
    }

    fn whose(&self) -> impl Iterator<Item = &Identity> {
        let whose = match self {
            Self::All => None,
            Self::Of { whose, .. } => Some(whose),
        };
        whose.into_iter().flatten()
    }
}

#[cfg(test)]
mod tests;
