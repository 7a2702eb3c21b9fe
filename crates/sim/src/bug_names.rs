//! Names of deliberate bugs.

use std::fmt::Debug;

/// Returns a bug's name for the command line: `AsksOnce` is `asks-once`.
#[must_use]
pub fn name(bug: impl Debug) -> String {
    let mut name = String::new();
    for letter in format!("{bug:?}").chars() {
        if letter.is_ascii_uppercase() && !name.is_empty() {
            name.push('-');
        }
        name.push(letter.to_ascii_lowercase());
    }
    name
}

/// Returns the bug of this name.
///
/// # Errors
/// There is no bug of this name.
pub fn by_name<B: Copy + Debug>(all: &[B], wanted: &str) -> Result<B, UnknownBug> {
    let found = all.iter().find(|bug| name(bug) == wanted);
    found.copied().ok_or_else(|| UnknownBug {
        requested: wanted.to_owned(),
        known: all.iter().map(name).collect(),
    })
}

/// No bug has the requested name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("there is no bug `{requested}`; use one of {}", .known.join(", "))]
pub struct UnknownBug {
    /// The name that no bug has.
    pub requested: String,
    /// The names of all bugs.
    pub known: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{conductor, handoff, membership, migration, pools, replication};

    #[test]
    fn bug_names_round_trip() {
        for bug in handoff::HandoffBug::ALL {
            assert_eq!(by_name(&handoff::HandoffBug::ALL, &name(bug)), Ok(bug));
        }
        for bug in migration::MigrationBug::ALL {
            assert_eq!(by_name(&migration::MigrationBug::ALL, &name(bug)), Ok(bug));
        }
        for bug in conductor::ConductorBug::ALL {
            assert_eq!(by_name(&conductor::ConductorBug::ALL, &name(bug)), Ok(bug));
        }
        let bugs = membership::MembershipBug::all();
        for bug in &bugs {
            assert_eq!(by_name(&bugs, &name(bug)), Ok(*bug));
        }
        for bug in replication::ReplicationBug::ALL {
            assert_eq!(
                by_name(&replication::ReplicationBug::ALL, &name(bug)),
                Ok(bug)
            );
        }
        assert_eq!(name(pools::PoolBug::NoTables), "no-tables");
        let error = by_name(&pools::PoolBug::ALL, "no-bug").expect_err("it is none");
        assert!(
            error
                .to_string()
                .contains("`no-bug`; use one of no-tables, one-block")
        );
    }
}
