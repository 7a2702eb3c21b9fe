//! Checks whether a process can move. The checks run on threads of their own, because they read much of `/proc`.

use holdfast_api::control::{BlockerEntry, ErrorBody, ProcessCheck};
use holdfast_proto::migration::{CheckReport, Completion, ProcessId, Results, Shape, Token};
use holdfast_sys::process::error::Error;
use holdfast_sys::process::inspect::{self, Blocker, Obstacle, Report};
use holdfast_wire::Flow;

use super::domains;
use super::keyrings;
use super::places::{Addresses, connections};
use super::policy::{Description, name_of};
use super::rehearsals::Inquiry;
use super::told::{Teller, Told};
use super::units::Units;
use crate::dataplane::shared_ports;

/// Advice if the process does not exist.
const OURS: &str = "name a process of this node, by its PID here; `ps -e` shows them";

/// Results of inspecting a process.
struct Found {
    report: Report,
    blockers: Vec<BlockerEntry>,
}

/// Finds state that only eBPF can read and that a move would lose. Yields the process and a description.
fn hidden_state(pids: &[i32]) -> impl Iterator<Item = (i32, String)> {
    domains::find(pids).into_iter().chain(keyrings::find(pids))
}

/// Refuses a tree in which a process has acquired such state since the check.
pub(super) fn refuse_hidden_state(root: i32) -> Result<(), String> {
    let pids = inspect::tree(root).map_err(|error| error.to_string())?;
    match hidden_state(&pids).next() {
        Some((pid, why)) => Err(format!("process {pid}: {why}")),
        None => Ok(()),
    }
}

fn look(root: i32, addresses: &Addresses, copy: bool) -> Result<Found, Error> {
    let report = inspect::inspect(root)?;
    let mut blockers: Vec<BlockerEntry> = report.blockers.iter().map(entry).collect();
    if !copy {
        blockers.extend(report.halved.iter().map(entry));
    }
    for (pid, reason) in hidden_state(&report.processes) {
        blockers.push(BlockerEntry {
            pid,
            fd: None,
            path: None,
            reason,
        });
    }
    if report.processes.contains(&(std::process::id() as i32)) {
        blockers.push(BlockerEntry {
            pid: root,
            fd: None,
            path: None,
            reason: "this daemon is one of its processes".to_owned(),
        });
    }
    for socket in &report.sockets {
        if let Err(reason) = addresses.check_socket(socket) {
            blockers.push(BlockerEntry {
                pid: root,
                fd: None,
                path: None,
                reason,
            });
        }
    }
    match shared_ports::obstacles(&report.processes) {
        Ok(obstacles) => {
            let entry = |(pid, fd, reason): (i32, u32, &str)| BlockerEntry {
                pid,
                fd: Some(fd),
                path: None,
                reason: reason.to_owned(),
            };
            blockers.extend(obstacles.into_iter().map(entry));
        }
        Err(error) => tracing::warn!(%error, "programs of shared ports are not looked for"),
    }
    Ok(Found { report, blockers })
}

fn entry(blocker: &Blocker) -> BlockerEntry {
    let pid = blocker.pid;
    match &blocker.obstacle {
        Obstacle::Descriptor { fd, path, reason } => BlockerEntry {
            pid,
            fd: *fd,
            path: Some(path.clone()),
            reason: reason.clone(),
        },
        other => BlockerEntry {
            pid,
            fd: None,
            path: None,
            reason: other.to_string(),
        },
    }
}

/// Checks a process for the operator; the event loop adds the predicted freeze.
pub(super) fn for_operator(root: i32, addresses: Addresses, inquiry: Inquiry, teller: Teller) {
    let look = move || {
        let (check, flows) = match check(root, &addresses) {
            Ok((check, flows)) => (Ok(check), flows),
            Err(why) => (Err(why), Vec::new()),
        };
        let check = Box::new(check);
        teller.tell(Told::Inspected {
            check,
            flows,
            inquiry,
        });
    };
    // Without a thread the reply is dropped, which the asking operator sees as an error.
    if let Err(error) = spawn(look) {
        tracing::error!(%error, "no thread for a look at a process");
    }
}

fn check(root: i32, addresses: &Addresses) -> Result<(ProcessCheck, Vec<Flow>), ErrorBody> {
    let found = look(root, addresses, false).map_err(|error| ErrorBody {
        error: error.to_string(),
        what_to_do: OURS.to_owned(),
    })?;
    let flows = connections(&found.report.sockets);
    let check = ProcessCheck {
        pid: root,
        name: name_of(root),
        movable: found.blockers.is_empty(),
        blockers: found.blockers,
        to: None,
        refusals: Vec::new(),
        processes: found.report.processes,
        threads: found.report.threads as u64,
        mappings: found.report.mappings as u64,
        descriptors: found.report.open_files as u64,
        sockets: found.report.sockets.len() as u64,
        memory_bytes: found.report.resident_bytes,
        forwarded: Vec::new(),
        predicted_freeze_us: 0.0,
    };
    Ok((check, flows))
}

/// Checks a process for the migration machine.
pub(super) fn for_machine(
    token: Token,
    (process, copy): (ProcessId, bool),
    hops: u32,
    (addresses, units): (Addresses, Units),
    teller: Teller,
) {
    let failed = teller.clone();
    let look = move || {
        let results = Results::Checked(report((process, copy), hops, (&addresses, &units)));
        teller.done(None, Completion { token, results });
    };
    if let Err(error) = spawn(look) {
        let results = Results::Checked(Err(vec![format!("no thread to look at it: {error}")]));
        failed.done(None, Completion { token, results });
    }
}

fn report(
    (process, copy): (ProcessId, bool),
    hops: u32,
    (addresses, units): (&Addresses, &Units),
) -> Result<CheckReport, Vec<String>> {
    let root = i32::try_from(process.0).map_err(|_| vec!["no such process".to_owned()])?;
    let found = look(root, addresses, copy).map_err(|error| vec![format!("{error}; {OURS}")])?;
    if !found.blockers.is_empty() {
        return Err(found.blockers.iter().map(text).collect());
    }
    let mut description = Description::read(&found.report.processes);
    let group = units.group_of(&found.report.processes);
    description.group = group.map_err(|why| vec![why])?;
    let count = |of: usize| u32::try_from(of).unwrap_or(u32::MAX);
    Ok(CheckReport {
        hops,
        memory: found.report.resident_bytes,
        shape: Shape {
            processes: count(found.report.processes.len()),
            threads: count(found.report.threads),
            mappings: count(found.report.mappings),
            shared: 0,
        },
        sockets: count(found.report.sockets.len()),
        description: description.encode().into(),
        ..CheckReport::default()
    })
}

/// Formats a blocker as one line.
fn text(blocker: &BlockerEntry) -> String {
    let mut text = format!("process {}", blocker.pid);
    if let Some(fd) = blocker.fd {
        text += &format!(", descriptor {fd}");
    }
    if let Some(path) = &blocker.path {
        text += &format!(" ({path})");
    }
    format!("{text}: {}", blocker.reason)
}

fn spawn(work: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    let builder = std::thread::Builder::new().name("check".to_owned());
    builder.spawn(work).map(drop)
}
