//! Checks that crates without IO and clock remain so: time is an argument, effects are data.

use proc_macro2::TokenTree;

use super::Finding;
use super::rust_file::{RustFile, is_ident, is_punct, start_line, walk_tokens};

/// Names that indicate a clock or an async runtime.
const CLOCK_NAMES: &[&str] = &["Instant", "SystemTime", "tokio"];
/// Names that indicate IO.
const IO_NAMES: &[&str] = &[
    "TcpStream",
    "TcpListener",
    "UdpSocket",
    "UnixStream",
    "UnixListener",
    "UnixDatagram",
];
/// Modules of `std` that indicate IO or threads.
const STD_IO_MODULES: &[&str] = &["fs", "thread", "process", "env"];

/// Folders with code that uses neither clock nor IO.
const PURE_FOLDERS: &[&str] = &[
    "crates/wire/src/",
    "crates/dns/src/",
    "crates/handlespace/src/",
    "crates/proto/src/",
];
/// Folders with code in virtual time that reads scenarios and writes results.
const CLOCK_FREE_FOLDERS: &[&str] = &["crates/sim/src/"];

/// The state machines of `proto`, none of which may use another's module.
const STATE_MACHINES: &[&str] = &[
    "registrar",
    "pool_element",
    "pool_user",
    "membership",
    "mobility",
    "handoff",
    "migration",
    "replication",
    "conductor",
    "credentials",
    "enrolment",
];

/// Checks that pure crates name no clock, socket, file or thread, and that no state machine names another.
pub fn check(sources: &[RustFile]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for source in sources {
        let is_below =
            |folders: &[&str]| folders.iter().any(|folder| source.path.starts_with(folder));
        let (is_pure, is_clock_free) = (is_below(PURE_FOLDERS), is_below(CLOCK_FREE_FOLDERS));
        if !is_pure && !is_clock_free {
            continue;
        }
        let machine = machine_of(source.path);
        walk_tokens(&source.tokens, &mut |siblings, position| {
            let TokenTree::Ident(ident) = &siblings[position] else {
                return;
            };
            let name = ident.to_string();
            let token_line = start_line(&siblings[position]);
            if CLOCK_NAMES.contains(&name.as_str()) || is_pure && IO_NAMES.contains(&name.as_str())
            {
                findings.push(Finding::new(
                    source.path,
                    token_line,
                    format!("`{name}`: this crate may use neither clock nor IO"),
                ));
            }
            if is_pure
                && name == "std"
                && names_after_path(siblings, position)
                    .iter()
                    .any(|next| STD_IO_MODULES.contains(&next.as_str()))
            {
                findings.push(Finding::new(
                    source.path,
                    token_line,
                    "a module of `std` that does IO, which this crate may not do",
                ));
            }
            if let (Some(machine), "crate") = (machine, name.as_str()) {
                let names = names_after_path(siblings, position);
                let other = names
                    .iter()
                    .find(|name| *name != machine && STATE_MACHINES.contains(&name.as_str()));
                if let Some(other) = other {
                    findings.push(Finding::new(
                        source.path,
                        token_line,
                        format!("machine `{machine}` uses machine `{other}`"),
                    ));
                }
            }
        });
    }
    findings
}

/// Returns the state machine that a file of `proto` belongs to.
fn machine_of(path: &str) -> Option<&'static str> {
    let inside = path.strip_prefix("crates/proto/src/")?;
    let first = inside.split(['/', '.']).next()?;
    STATE_MACHINES
        .iter()
        .find(|machine| **machine == first)
        .copied()
}

/// Returns the names that may follow `path ::`: one, or the first of each branch of a braced list.
fn names_after_path(siblings: &[TokenTree], position: usize) -> Vec<String> {
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
    use super::super::rust_file::parse;
    use super::super::test_tree::{positions, tree};
    use super::*;

    fn findings_of(path: &str, text: &str) -> Vec<String> {
        let tree = tree(&[(path, text)]);
        positions(&check(&parse(&tree).0))
    }

    #[test]
    fn clock_in_machine_is_found() {
        assert_eq!(
            findings_of("crates/proto/src/lib.rs", "use std::time::Instant;"),
            ["crates/proto/src/lib.rs:1"]
        );
        assert_eq!(
            findings_of("crates/sim/src/lib.rs", "fn f() {\n SystemTime::now();\n}"),
            ["crates/sim/src/lib.rs:2"]
        );
        assert!(findings_of("crates/proto/src/lib.rs", "use std::time::Duration;").is_empty());
        assert!(findings_of("crates/node/src/lib.rs", "use std::time::Instant;").is_empty());
    }

    #[test]
    fn io_in_parser_is_found() {
        assert_eq!(
            findings_of("crates/wire/src/lib.rs", "use std::{net::TcpStream};"),
            ["crates/wire/src/lib.rs:1"]
        );
        assert_eq!(
            findings_of("crates/wire/src/lib.rs", "use std::{fs, fmt};"),
            ["crates/wire/src/lib.rs:1"]
        );
        assert_eq!(
            findings_of(
                "crates/wire/src/lib.rs",
                "fn f() { std::thread::yield_now() }"
            ),
            ["crates/wire/src/lib.rs:1"]
        );
        assert!(
            findings_of("crates/wire/src/lib.rs", "use std::{fmt, net::SocketAddr};").is_empty()
        );
        assert!(findings_of("crates/wire/tests/a.rs", "use std::fs;").is_empty());
    }

    #[test]
    fn machine_using_another_is_found() {
        let path = "crates/proto/src/handoff/donor.rs";
        assert_eq!(
            findings_of(path, "use crate::migration::Round;"),
            [format!("{path}:1")]
        );
        assert_eq!(
            findings_of(path, "use crate::{ownership, registrar::A};"),
            [format!("{path}:1")]
        );
        assert!(findings_of(path, "use crate::handoff::Output;\nuse crate::ownership;").is_empty());
        assert!(
            findings_of(
                "crates/proto/src/lib.rs",
                "pub use crate::handoff::Handoff;"
            )
            .is_empty()
        );
    }
}
