//! What a process that comes may be and have, judged before any of it has an effect.
//!
//! A donor may have been taken over: whatever it sends is a claim. [`Judge`] goes through every field of an image and says what an
//! ordinary user's process may have of it: no more than the user could get at this node. [`Conversation`] says when, and how
//! often, each message may come. Where a node takes root's processes ([`Allowed::has_root`]) an image may have anything: whoever
//! may send one of root's processes may do everything at that node.
//!
//! What the kernel checks again, since the process itself asks for it with its own rights, is let through. What the restorer or
//! the daemon does with rights of theirs is judged here: credentials, limits, scheduling, seccomp filters, options and ports of
//! sockets, owners of files and segments.
//!
//! **A new kind of state**: every struct and enum of an image is taken apart here without `..`, so that a new field or variant does
//! not compile until it is judged. Name the field in its pattern: with `_` and a word why where an ordinary user may set it to
//! anything, else with a check that refuses by name (`refuse` takes the reason as a person reads it). A socket option that takes a
//! capability goes into `PRIVILEGED` (`sockets.rs`). Add a case to the table of this module's tests.

mod files;
mod here;
mod order;
mod sockets;
mod state;
mod tree;

pub use here::{Here, RESOURCES};
pub use order::{Conversation, Message};

use crate::cgroup::Group;
use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};

/// Whether an image may come, or why not.
pub type Verdict = Result<(), String>;

/// What the policy of this node allows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Allowed {
    /// Users that processes may run as.
    pub users: BTreeSet<u32>,
    /// Groups that they may belong to; any where root is among the users.
    pub groups: BTreeSet<u32>,
    /// Directories whose programs they may run.
    pub programs: Vec<PathBuf>,
    /// Ports that are privileged here, and that sockets may have all the same.
    pub ports: BTreeSet<u16>,
}

impl Allowed {
    /// Whether root's processes may come.
    #[must_use]
    pub fn has_root(&self) -> bool {
        self.users.contains(&0)
    }
}

/// Judges images by what the policy allows and what this node gives ordinary users.
#[derive(Clone, Debug)]
pub struct Judge {
    allowed: Allowed,
    here: Here,
}

impl Judge {
    /// A judge of a node.
    #[must_use]
    pub fn new(allowed: Allowed, here: Here) -> Self {
        Self { allowed, here }
    }

    /// The first port that every process may have that comes.
    #[must_use]
    pub fn first_port(&self) -> u16 {
        match self.allowed.has_root() {
            true => 0,
            false => self.here.first_port,
        }
    }

    /// Whether processes may run as this user.
    ///
    /// # Errors
    /// The reason.
    pub fn user(&self, user: u32) -> Verdict {
        match self.allowed.users.contains(&user) {
            true => Ok(()),
            false => Err(format!(
                "user {user} is not in its list [migration] users of those whose processes may come"
            )),
        }
    }

    /// Whether processes may belong to these groups.
    ///
    /// # Errors
    /// The reason.
    pub fn groups<'a>(&self, mut groups: impl Iterator<Item = &'a u32>) -> Verdict {
        match groups.find(|group| !self.allowed.has_root() && !self.allowed.groups.contains(group))
        {
            None => Ok(()),
            Some(group) => Err(format!(
                "group {group} is not in its list [migration] groups of those whose processes may come"
            )),
        }
    }

    /// Whether processes may run a program: one below the directories that are listed, without going up.
    ///
    /// # Errors
    /// The reason.
    pub fn program(&self, program: &Path) -> Verdict {
        let plain = (program.components()).all(|part| part != Component::ParentDir);
        let below = |directory: &PathBuf| program.starts_with(directory);
        match plain && self.allowed.programs.iter().any(below) {
            true => Ok(()),
            false => Err(format!(
                "program {} is not below one of its directories [migration] paths",
                program.display()
            )),
        }
    }

    /// Whether a control group may be made for a process: one that takes nothing away from others.
    ///
    /// # Errors
    /// The reason.
    pub fn group(&self, group: &Group) -> Verdict {
        if self.allowed.has_root() {
            return Ok(());
        }
        for (file, value) in group.limits() {
            let takes = match file {
                "memory.min" | "memory.low" | "cpu.uclamp.min" => true,
                file if file.starts_with("cpuset.") => true,
                "cpu.weight" | "io.weight" => {
                    let weight = value
                        .rsplit(' ')
                        .next()
                        .and_then(|weight| weight.parse::<u64>().ok());
                    weight.is_none_or(|weight| weight > 100)
                }
                // Each bounds the group and nobody else.
                _ => false,
            };
            if takes {
                return refuse(format!(
                    "its control group has {file} = {value}, which takes from others"
                ));
            }
        }
        Ok(())
    }

    /// Somebody whom an object names as its owner.
    fn owner(&self, (user, group): (u32, u32), of: &str) -> Verdict {
        let named = |why: String| format!("{of}: {why}");
        self.user(user).map_err(named)?;
        self.groups(std::iter::once(&group)).map_err(named)
    }
}

/// Refuses what only root's processes may have.
fn refuse(what: impl std::fmt::Display) -> Verdict {
    Err(format!(
        "{what}: such processes come only where [migration] users has 0"
    ))
}

/// Refuses unless it holds.
fn require(holds: bool, otherwise: impl FnOnce() -> String) -> Verdict {
    match holds {
        true => Ok(()),
        false => refuse(otherwise()),
    }
}

#[cfg(test)]
mod tests;
