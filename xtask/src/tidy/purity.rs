//! Checks that crates without IO and clock remain so: time is an argument, effects are data.

use proc_macro2::TokenTree;

use super::Finding;
use super::source::{Source, is_ident, is_punct, line, walk};

/// Names that indicate a clock or an async runtime.
const CLOCKS: &[&str] = &["Instant", "SystemTime", "tokio"];
/// Names that indicate IO.
const IO: &[&str] = &[
    "TcpStream",
    "TcpListener",
    "UdpSocket",
    "UnixStream",
    "UnixListener",
    "UnixDatagram",
];
/// Modules of `std` that indicate IO or threads.
const STD: &[&str] = &["fs", "thread", "process", "env"];

/// Folders with code that uses neither clock nor IO.
const PURE: &[&str] = &[
    "crates/wire/src/",
    "crates/handlespace/src/",
    "crates/proto/src/",
];
/// Folders with code in virtual time that reads scenarios and writes results.
const TIMELESS: &[&str] = &["crates/sim/src/"];

/// The state machines of `proto`, none of which may use another's module.
const MACHINES: &[&str] = &[
    "registrar",
    "pool_element",
    "pool_user",
    "membership",
    "mobility",
    "handoff",
    "migration",
    "replication",
    "conductor",
];

/// Checks that pure crates name no clock, socket, file or thread, and that no state machine names another.
pub fn check(sources: &[Source]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for source in sources {
        let starts =
            |folders: &[&str]| folders.iter().any(|folder| source.path.starts_with(folder));
        let (pure, timeless) = (starts(PURE), starts(TIMELESS));
        if !pure && !timeless {
            continue;
        }
        let machine = machine(source.path);
        walk(&source.tokens, &mut |siblings, position| {
            let TokenTree::Ident(ident) = &siblings[position] else {
                return;
            };
            let name = ident.to_string();
            let at = line(&siblings[position]);
            if CLOCKS.contains(&name.as_str()) || pure && IO.contains(&name.as_str()) {
                findings.push(Finding::new(
                    source.path,
                    at,
                    format!("`{name}`: this crate has neither clock nor IO"),
                ));
            }
            if pure
                && name == "std"
                && after_colons(siblings, position)
                    .iter()
                    .any(|next| STD.contains(&next.as_str()))
            {
                findings.push(Finding::new(
                    source.path,
                    at,
                    "a module of `std` that does IO: this crate has none",
                ));
            }
            if let (Some(machine), "crate") = (machine, name.as_str()) {
                let names = after_colons(siblings, position);
                let other = names
                    .iter()
                    .find(|name| *name != machine && MACHINES.contains(&name.as_str()));
                if let Some(other) = other {
                    findings.push(Finding::new(
                        source.path,
                        at,
                        format!("machine `{machine}` uses machine `{other}`"),
                    ));
                }
            }
        });
    }
    findings
}

/// Returns the state machine that a file of `proto` belongs to.
fn machine(path: &str) -> Option<&'static str> {
    let inside = path.strip_prefix("crates/proto/src/")?;
    let first = inside.split(['/', '.']).next()?;
    MACHINES.iter().find(|machine| **machine == first).copied()
}

/// Returns the names that may follow `path ::`: one, or the first of each branch of a braced list.
fn after_colons(siblings: &[TokenTree], position: usize) -> Vec<String> {
    if !is_punct(siblings.get(position + 1), ':') || !is_punct(siblings.get(position + 2), ':') {
        return Vec::new();
    }
    match siblings.get(position + 3) {
        Some(TokenTree::Ident(ident)) => vec![ident.to_string()],
        Some(TokenTree::Group(group)) => {
            let branches: Vec<TokenTree> = group.stream().into_iter().collect();
            let firsts = branches
                .split(|tree| is_punct(Some(tree), ','))
                .filter_map(|branch| branch.first());
            firsts
                .filter(|first| !is_ident(Some(first), "self"))
                .map(|first| first.to_string())
                .collect()
        }
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixture::{places, tree};
    use super::super::source::parse;
    use super::*;

    fn found(path: &str, text: &str) -> Vec<String> {
        let tree = tree(&[(path, text)]);
        places(&check(&parse(&tree).0))
    }

    #[test]
    fn a_clock_in_a_machine_is_found() {
        assert_eq!(
            found("crates/proto/src/lib.rs", "use std::time::Instant;"),
            ["crates/proto/src/lib.rs:1"]
        );
        assert_eq!(
            found("crates/sim/src/lib.rs", "fn f() {\n SystemTime::now();\n}"),
            ["crates/sim/src/lib.rs:2"]
        );
        assert!(found("crates/proto/src/lib.rs", "use std::time::Duration;").is_empty());
        assert!(found("crates/node/src/lib.rs", "use std::time::Instant;").is_empty());
    }

    #[test]
    fn io_in_a_parser_is_found() {
        assert_eq!(
            found("crates/wire/src/lib.rs", "use std::{net::TcpStream};"),
            ["crates/wire/src/lib.rs:1"]
        );
        assert_eq!(
            found("crates/wire/src/lib.rs", "use std::{fs, fmt};"),
            ["crates/wire/src/lib.rs:1"]
        );
        assert_eq!(
            found(
                "crates/wire/src/lib.rs",
                "fn f() { std::thread::yield_now() }"
            ),
            ["crates/wire/src/lib.rs:1"]
        );
        assert!(found("crates/wire/src/lib.rs", "use std::{fmt, net::SocketAddr};").is_empty());
        assert!(found("crates/wire/tests/a.rs", "use std::fs;").is_empty());
    }

    #[test]
    fn a_machine_that_uses_another_is_found() {
        let path = "crates/proto/src/handoff/donor.rs";
        assert_eq!(
            found(path, "use crate::migration::Round;"),
            [format!("{path}:1")]
        );
        assert_eq!(
            found(path, "use crate::{ownership, registrar::A};"),
            [format!("{path}:1")]
        );
        assert!(found(path, "use crate::handoff::Output;\nuse crate::ownership;").is_empty());
        assert!(
            found(
                "crates/proto/src/lib.rs",
                "pub use crate::handoff::Handoff;"
            )
            .is_empty()
        );
    }
}
