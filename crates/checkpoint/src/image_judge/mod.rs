//! Judgement of incoming images: the state that a process may have here, checked before any of it takes effect.
//!
//! A donor may be compromised: everything it sends is a claim. [`ImageJudge`] checks every field of an image against the
//! rights of an ordinary user's process, which may have no more than the user could get at this node. [`MessageSequence`]
//! checks the order and the number of messages. If a node accepts root's processes ([`ImagePolicy::has_root`]), an image
//! may contain anything: a donor that may send one of root's processes may do everything at that node.
//!
//! State that the kernel checks again, because the process itself requests it with its own rights, is let through.
//! State that the restorer or the daemon sets with its own rights is judged here: credentials, limits, scheduling,
//! seccomp filters, options and ports of sockets, owners of files and segments.
//!
//! **A new kind of state**: every struct and enum of an image is destructured here without `..`, so that a new field or
//! variant does not compile until it is judged. Name the field in its pattern: with `_` and a comment giving the reason
//! if an ordinary user may set it to anything, else with a check that refuses by name (`refuse_for_users` takes the reason as a
//! person reads it). A socket option that requires a capability belongs in `PRIVILEGED_OPTIONS` (`sockets.rs`). Add a case to
//! the table of this module's tests.

mod files;
mod message_order;
mod node_limits;
mod process_state;
mod sockets;
mod tree;

pub use message_order::{DonorMessageKind, MessageSequence};
pub use node_limits::{NodeLimits, RESOURCE_COUNT};

use holdfast_sys::cgroup::ControlGroup;
use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};

/// Result of judging; an error is the reason of the refusal.
pub type Verdict = Result<(), String>;

/// Policy of this node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImagePolicy {
    /// Users as which processes may run.
    pub users: BTreeSet<u32>,
    /// Groups to which processes may belong; any group if root is among the users.
    pub groups: BTreeSet<u32>,
    /// Directories with the programs that processes may run.
    pub programs: Vec<PathBuf>,
    /// Ports that are privileged here, and that sockets may have nevertheless.
    pub ports: BTreeSet<u16>,
}

impl ImagePolicy {
    /// Returns true if root's processes are accepted.
    #[must_use]
    pub fn has_root(&self) -> bool {
        self.users.contains(&0)
    }
}

/// Judge of images, by the policy and by the limits of ordinary users at this node.
#[derive(Clone, Debug)]
pub struct ImageJudge {
    policy: ImagePolicy,
    node_limits: NodeLimits,
}

impl ImageJudge {
    /// Creates the judge of a node.
    #[must_use]
    pub fn new(policy: ImagePolicy, node_limits: NodeLimits) -> Self {
        Self {
            policy,
            node_limits,
        }
    }

    /// Returns the first port that every accepted process may have.
    #[must_use]
    pub fn first_port(&self) -> u16 {
        match self.policy.has_root() {
            true => 0,
            false => self.node_limits.first_port,
        }
    }

    /// Checks that processes may run as this user.
    ///
    /// # Errors
    /// The reason of the refusal.
    pub fn check_user(&self, user: u32) -> Verdict {
        match self.policy.users.contains(&user) {
            true => Ok(()),
            false => Err(format!(
                "user {user} is not in its list of admitted users ([migration] users)"
            )),
        }
    }

    /// Checks that processes may belong to these groups.
    ///
    /// # Errors
    /// The reason of the refusal.
    pub fn check_groups<'a>(&self, mut groups: impl Iterator<Item = &'a u32>) -> Verdict {
        match groups.find(|group| !self.policy.has_root() && !self.policy.groups.contains(group)) {
            None => Ok(()),
            Some(group) => Err(format!(
                "group {group} is not in its list of admitted groups ([migration] groups)"
            )),
        }
    }

    /// Checks that processes may run a program: one below the listed directories, without `..` in its path.
    ///
    /// # Errors
    /// The reason of the refusal.
    pub fn check_program(&self, program: &Path) -> Verdict {
        let has_no_parent_parts = (program.components()).all(|part| part != Component::ParentDir);
        let is_below = |directory: &PathBuf| program.starts_with(directory);
        match has_no_parent_parts && self.policy.programs.iter().any(is_below) {
            true => Ok(()),
            false => Err(format!(
                "program {} is not below one of its admitted directories ([migration] paths)",
                program.display()
            )),
        }
    }

    /// Checks that a control group may be created for a process: one that takes no resources from others.
    ///
    /// # Errors
    /// The reason of the refusal.
    pub fn check_control_group(&self, group: &ControlGroup) -> Verdict {
        if self.policy.has_root() {
            return Ok(());
        }
        for (file, value) in group.limits() {
            let takes_resources = match file {
                "memory.min" | "memory.low" | "cpu.uclamp.min" => true,
                file if file.starts_with("cpuset.") => true,
                "cpu.weight" | "io.weight" => {
                    let weight = value
                        .rsplit(' ')
                        .next()
                        .and_then(|weight| weight.parse::<u64>().ok());
                    weight.is_none_or(|weight| weight > 100)
                }
                // The other files limit this group only.
                _ => false,
            };
            if takes_resources {
                return refuse_for_users(format!(
                    "its control group has {file} = {value}, which takes resources from others"
                ));
            }
        }
        Ok(())
    }

    /// Checks the user and group that an object names as its owner.
    fn check_owner(&self, (user, group): (u32, u32), object: &str) -> Verdict {
        let with_object = |why: String| format!("{object}: {why}");
        self.check_user(user).map_err(with_object)?;
        self.check_groups(std::iter::once(&group))
            .map_err(with_object)
    }
}

/// Refuses state that only root's processes may have.
fn refuse_for_users(what: impl std::fmt::Display) -> Verdict {
    Err(format!(
        "{what}: this is admitted only if [migration] users contains 0"
    ))
}

/// Refuses unless `is_allowed` is true.
fn require(is_allowed: bool, message: impl FnOnce() -> String) -> Verdict {
    match is_allowed {
        true => Ok(()),
        false => refuse_for_users(message()),
    }
}

#[cfg(test)]
mod tests;
