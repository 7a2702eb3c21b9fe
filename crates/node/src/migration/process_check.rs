//! Checks whether a process can move. The checks run on threads of their own, because they read much of `/proc`.

use holdfast_api::control::{BlockerEntry, ErrorBody, ProcessCheck};
use holdfast_checkpoint::error::Error;
use holdfast_checkpoint::inspect::{self, Blocker, InspectionReport, Obstacle};
use holdfast_proto::migration::{
    CheckReport, CommandToken, Completion, ProcessId, ProcessTree, Results,
};
use holdfast_wire::Flow;
use holdfast_wire::failure::{Context, Failure, OperatorFault, ProgramFault, Text};

use super::admission_policy::{ProcessDescription, process_name};
use super::keyrings;
use super::landlock_refusal;
use super::rehearsals::MoveInquiry;
use super::socket_endpoints::{MovableAddresses, connection_flows};
use super::systemd_units::SystemdUnits;
use super::worker_events::{EventSender, WorkerEvent};
use crate::dataplane::shared_ports;
use crate::failure_conversion::{IntoFailure, thread_failure};

/// Advice if the process does not exist.
const PID_ADVICE: &str = "use the PID of a process on this node; `ps -e` lists them";

/// Results of inspecting a process.
struct TreeInspection {
    report: InspectionReport,
    blockers: Vec<BlockerEntry>,
}

/// Finds state that only eBPF can read and that a move would lose. Yields the process and a description.
fn hidden_state(pids: &[i32]) -> impl Iterator<Item = (i32, Failure)> {
    landlock_refusal::find_in_domain(pids)
        .into_iter()
        .chain(keyrings::find_with_keys(pids))
}

/// Refuses a tree in which a process has acquired such state since the check.
pub(super) fn refuse_hidden_state(root: i32) -> Result<(), Failure> {
    let pids = inspect::tree_pids(root).map_err(IntoFailure::into_own_failure)?;
    match hidden_state(&pids).next() {
        Some((pid, why)) => Err(why.within(Context::Process(pid))),
        None => Ok(()),
    }
}

fn inspect_tree(
    root: i32,
    addresses: &MovableAddresses,
    is_clone: bool,
) -> Result<TreeInspection, Error> {
    let report = inspect::inspect(root)?;
    let mut blockers: Vec<BlockerEntry> = report.blockers.iter().map(blocker_entry).collect();
    if !is_clone {
        blockers.extend(report.split_connections.iter().map(blocker_entry));
    }
    for (pid, why) in hidden_state(&report.processes) {
        blockers.push(BlockerEntry {
            pid,
            fd: None,
            path: None,
            reason: why.to_string(),
        });
    }
    if report.processes.contains(&(std::process::id() as i32)) {
        blockers.push(BlockerEntry {
            pid: root,
            fd: None,
            path: None,
            reason: "this daemon is one of the processes".to_owned(),
        });
    }
    for socket in &report.sockets {
        if let Err(why) = addresses.check_socket(socket) {
            blockers.push(BlockerEntry {
                pid: root,
                fd: None,
                path: None,
                reason: why.to_string(),
            });
        }
    }
    match shared_ports::blockers(&report.processes) {
        Ok(obstacles) => {
            let port_entry = |(pid, fd, fault): (i32, u32, ProgramFault)| BlockerEntry {
                pid,
                fd: Some(fd),
                path: None,
                reason: fault.to_string(),
            };
            blockers.extend(obstacles.into_iter().map(port_entry));
        }
        Err(error) => tracing::warn!(%error, "cannot check shared ports for programs"),
    }
    Ok(TreeInspection { report, blockers })
}

fn blocker_entry(blocker: &Blocker) -> BlockerEntry {
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
pub(super) fn start_operator_check(
    root: i32,
    addresses: MovableAddresses,
    inquiry: MoveInquiry,
    events: EventSender,
) {
    let run = move || {
        let (check, flows) = match check_process(root, &addresses) {
            Ok((check, flows)) => (Ok(check), flows),
            Err(why) => (Err(why), Vec::new()),
        };
        let check = Box::new(check);
        events.send(WorkerEvent::CheckDone {
            check,
            flows,
            inquiry,
        });
    };
    // Without a thread the reply is dropped, which the asking operator sees as an error.
    if let Err(error) = spawn_thread(run) {
        tracing::error!(%error, "cannot start a thread to check a process");
    }
}

/// Checks a process. Returns the flows of its connections, too. Reads much of `/proc`: not for the event loop.
///
/// # Errors
/// There is no such process.
pub(crate) fn check_process(
    root: i32,
    addresses: &MovableAddresses,
) -> Result<(ProcessCheck, Vec<Flow>), ErrorBody> {
    let inspection = inspect_tree(root, addresses, false).map_err(|error| ErrorBody {
        error: error.to_string(),
        what_to_do: PID_ADVICE.to_owned(),
    })?;
    let flows = connection_flows(&inspection.report.sockets);
    let check = ProcessCheck {
        pid: root,
        name: process_name(root),
        movable: inspection.blockers.is_empty(),
        blockers: inspection.blockers,
        to: None,
        refusals: Vec::new(),
        processes: inspection.report.processes,
        threads: inspection.report.threads as u64,
        mappings: inspection.report.mappings as u64,
        descriptors: inspection.report.open_files as u64,
        sockets: inspection.report.sockets.len() as u64,
        memory_bytes: inspection.report.resident_bytes,
        forwarded: Vec::new(),
        predicted_freeze_us: 0.0,
    };
    Ok((check, flows))
}

/// Checks a process for the migration machine.
pub(super) fn start_machine_check(
    token: CommandToken,
    (process, is_clone): (ProcessId, bool),
    hops: u32,
    (addresses, units): (MovableAddresses, SystemdUnits),
    events: EventSender,
) {
    let failure_events = events.clone();
    let run = move || {
        let results = Results::Checked(check_report(
            (process, is_clone),
            hops,
            (&addresses, &units),
        ));
        events.command_done(None, Completion { token, results });
    };
    if let Err(error) = spawn_thread(run) {
        let results = Results::Checked(Err(vec![thread_failure(&error)]));
        failure_events.command_done(None, Completion { token, results });
    }
}

fn check_report(
    (process, is_clone): (ProcessId, bool),
    hops: u32,
    (addresses, units): (&MovableAddresses, &SystemdUnits),
) -> Result<CheckReport, Vec<Failure>> {
    let no_such_process = || OperatorFault::NoSuchProcess { pid: process.0 };
    let root = i32::try_from(process.0).map_err(|_| vec![no_such_process().into()])?;
    let inspection = inspect_tree(root, addresses, is_clone).map_err(|error| match error {
        Error::ProcessEnded(pid) if pid == root => vec![no_such_process().into()],
        other => vec![other.into_own_failure()],
    })?;
    if !inspection.blockers.is_empty() {
        return Err(inspection.blockers.into_iter().map(obstacle).collect());
    }
    let mut description = ProcessDescription::read(&inspection.report.processes);
    let group = units.group_of(&inspection.report.processes);
    description.group = group.map_err(|why| vec![why])?;
    let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
    Ok(CheckReport {
        hops,
        memory: inspection.report.resident_bytes,
        tree: ProcessTree {
            processes: count(inspection.report.processes.len()),
            threads: count(inspection.report.threads),
            mappings: count(inspection.report.mappings),
            shared_bytes: 0,
        },
        sockets: count(inspection.report.sockets.len()),
        description: description.encode().into(),
        ..CheckReport::default()
    })
}

/// Returns the failure for a blocker.
pub(crate) fn obstacle(blocker: BlockerEntry) -> Failure {
    ProgramFault::Obstacle {
        pid: blocker.pid,
        fd: blocker.fd,
        path: blocker.path.map(Text::from),
        reason: blocker.reason.into(),
    }
    .into()
}

fn spawn_thread(work: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    let builder = std::thread::Builder::new().name("move-check".to_owned());
    builder.spawn(work).map(drop)
}
