//! `holdfast load`: the load of this node and of its processes, and loads that programs report.

use anyhow::Result;
use clap::{Args, Subcommand};
use holdfast_api::control::{
    LoadReportEntry, LoadReportRequest, LoadWithdrawRequest, NodeLoadEntry, NodeLoadStatus,
};

use crate::ExitResult;
use crate::daemon_client::DaemonArgs;
use crate::output::{output, output_line, print_json};
use crate::process_arg::ProcessArg;
use crate::table::{TextTable, optional_number};

/// Show the load of this node and of its processes, or report a load that only a program itself knows
#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "Examples:
  holdfast load
  holdfast load --json | jq .load.load
  holdfast load report players 37 --pid 4711 --full-at 64 --for 60"
)]
pub struct LoadArgs {
    #[command(subcommand)]
    action: Option<LoadAction>,
    #[command(flatten)]
    daemon: DaemonArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum LoadAction {
    Report(LoadReportArgs),
    Withdraw(LoadWithdrawArgs),
}

/// Report a load, such as players or sessions; the report ends unless it is repeated
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  holdfast load report players 37 --pid 4711
  holdfast load report sessions 1200 --pid game.service --full-at 2000 --for 60
  holdfast load report temperature 71.5")]
struct LoadReportArgs {
    #[command(flatten)]
    daemon: DaemonArgs,
    /// The load's name: 1 to 32 of a-z, 0-9 and _, beginning with a letter
    name: String,
    /// The value, 0 to 2^53, in any unit
    value: f64,
    #[command(flatten)]
    subject: SubjectArgs,
    /// Value at which the process takes no more load; with it the report counts in the load that pool policies compare
    #[arg(long, value_name = "VALUE")]
    full_at: Option<f64>,
    /// Time after which the report ends unless it is repeated, 1 to 86400 seconds
    #[arg(long = "for", value_name = "SECONDS", default_value_t = 30)]
    for_s: u64,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Withdraw a reported load
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  holdfast load withdraw players --pid 4711\n\nExit codes: 0 withdrawn, 1 there was no such \
                  report, or the command failed."
)]
struct LoadWithdrawArgs {
    #[command(flatten)]
    daemon: DaemonArgs,
    /// The load's name
    name: String,
    #[command(flatten)]
    subject: SubjectArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct SubjectArgs {
    /// The process that the report is about, by PID or systemd unit [default: the node as a whole, which only root may
    /// report about]
    #[arg(long, value_name = "PID|UNIT")]
    pid: Option<ProcessArg>,
}

/// Runs `holdfast load`.
///
/// # Errors
/// The daemon does not answer, or refuses.
pub fn run(args: &LoadArgs) -> Result<ExitResult> {
    match &args.action {
        Some(LoadAction::Report(args)) => report(args),
        Some(LoadAction::Withdraw(args)) => withdraw(args),
        None => show(args),
    }
}

fn show(args: &LoadArgs) -> Result<ExitResult> {
    let client = args.daemon.client()?;
    let status = args.daemon.ask(&client, |client| client.load())?;
    if args.json {
        print_json(&status)?;
    } else {
        output!("{}", status_text(&status));
    }
    Ok(ExitResult::Success)
}

fn report(args: &LoadReportArgs) -> Result<ExitResult> {
    let client = args.daemon.client()?;
    let pid = (args.subject.pid.as_ref()).map(|process| process.pid(&args.daemon, &client));
    let request = LoadReportRequest {
        name: args.name.clone(),
        value: args.value,
        full_at: args.full_at,
        pid: pid.transpose()?,
        for_s: Some(args.for_s),
    };
    let entry = (args.daemon).ask(&client, |client| client.report_load(&request))?;
    if args.json {
        print_json(&entry)?;
    } else {
        output_line!("{} for {} s", report_text(&entry), entry.ends_in_s);
    }
    Ok(ExitResult::Success)
}

fn withdraw(args: &LoadWithdrawArgs) -> Result<ExitResult> {
    let client = args.daemon.client()?;
    let pid = (args.subject.pid.as_ref()).map(|process| process.pid(&args.daemon, &client));
    let request = LoadWithdrawRequest {
        name: args.name.clone(),
        pid: pid.transpose()?,
    };
    let answer = (args.daemon).ask(&client, |client| client.withdraw_load(&request))?;
    let subject = subject_text(request.pid);
    match (args.json, answer.was_valid) {
        (true, _) => print_json(&answer)?,
        (false, true) => output_line!("{} of {subject} is withdrawn", args.name),
        (false, false) => output_line!("{subject} has no report of {}", args.name),
    }
    Ok(match answer.was_valid {
        true => ExitResult::Success,
        false => ExitResult::Failed,
    })
}

fn subject_text(pid: Option<i32>) -> String {
    pid.map_or("the node".to_owned(), |pid| format!("process {pid}"))
}

fn report_text(report: &LoadReportEntry) -> String {
    let full = report.full_at.map(|full| format!(" of {full}"));
    let (name, value, full) = (&report.name, report.value, full.unwrap_or_default());
    format!("{name} of {}: {value}{full}", subject_text(report.pid))
}

/// Returns thousandths of a processor as processors.
fn processors(millis: u32) -> String {
    format!("{:.3}", f64::from(millis) / 1000.0)
}

fn megabytes(kib: u64) -> String {
    format!("{:.1}", kib as f64 / 1024.0)
}

fn status_text(status: &NodeLoadStatus) -> String {
    let mut text = match &status.load {
        Some(load) => node_text(&status.node, load),
        None => format!(
            "node {}: the load is not known yet; ask again in two seconds\n",
            status.node
        ),
    };
    if !status.processes.is_empty() {
        let mut table = TextTable::new([
            "pid",
            "program",
            "cpu",
            "demand",
            "waiting",
            "MiB",
            "processes",
            "threads",
            "clients",
            "reported",
        ]);
        for process in &status.processes {
            let reports = status.reports.iter();
            let own = reports.filter(|report| report.pid == Some(process.pid));
            table.row([
                process.pid.to_string(),
                process.name.clone(),
                processors(process.cpu_millis),
                processors(process.demand_millis),
                processors(process.waiting_millis),
                megabytes(process.memory_kib),
                process.processes.to_string(),
                process.threads.to_string(),
                optional_number(process.clients),
                own.map(cell_text).collect::<Vec<_>>().join(", "),
            ]);
        }
        text += &format!("\n{}", table.text());
    }
    for report in status.reports.iter().filter(|report| report.pid.is_none()) {
        text += &format!(
            "\n{}, valid for {} s",
            report_text(report),
            report.ends_in_s
        );
    }
    if !text.ends_with('\n') {
        text.push('\n');
    }
    text
}

fn cell_text(report: &LoadReportEntry) -> String {
    let full = report.full_at.map(|full| format!("/{full}"));
    format!(
        "{} {}{}",
        report.name,
        report.value,
        full.unwrap_or_default()
    )
}

fn node_text(node: &str, load: &NodeLoadEntry) -> String {
    let used = load
        .memory_used_kib
        .map(|kib| format!("{} MiB used, ", megabytes(kib)));
    format!(
        "node {node}: load {:.1} %\n\
         processors: {} used, {} wanted, of {}; some process waits {:.1} % of the time\n\
         memory: {}{} MiB free\n\
         network: {} bytes/s in, {} bytes/s out\n\
         flows: {} of {}\n",
        load.load * 100.0,
        processors(load.cpu_millis),
        processors(load.demand_millis),
        processors(load.capacity_millis),
        f64::from(load.waiting_millis) / 10.0,
        used.unwrap_or_default(),
        megabytes(load.memory_free_kib),
        load.received_bytes_s,
        load.sent_bytes_s,
        load.flows,
        load.flow_capacity
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_api::control::ProcessLoadEntry;

    fn entry(pid: Option<i32>, full_at: Option<f64>) -> LoadReportEntry {
        LoadReportEntry {
            name: "players".to_owned(),
            pid,
            value: 37.0,
            full_at,
            ends_in_s: 30,
        }
    }

    #[test]
    fn table_has_node_processes_and_reports() {
        let status = NodeLoadStatus {
            node: "n1".to_owned(),
            load: Some(NodeLoadEntry {
                load: 0.75,
                cpu_millis: 150,
                demand_millis: 150,
                capacity_millis: 200,
                memory_free_kib: 2048,
                flow_capacity: 65536,
                ..NodeLoadEntry::default()
            }),
            processes: vec![ProcessLoadEntry {
                pid: 4711,
                name: "redis-server".to_owned(),
                cpu_millis: 148,
                demand_millis: 148,
                memory_kib: 9216,
                processes: 1,
                threads: 4,
                clients: Some(20),
                ..ProcessLoadEntry::default()
            }],
            reports: vec![entry(None, None), entry(Some(4711), Some(64.0))],
        };
        let expected = "\
node n1: load 75.0 %
processors: 0.150 used, 0.150 wanted, of 0.200; some process waits 0.0 % of the time
memory: 2.0 MiB free
network: 0 bytes/s in, 0 bytes/s out
flows: 0 of 65536

pid   program       cpu    demand  waiting  MiB  processes  threads  clients  reported
4711  redis-server  0.148  0.148   0.000    9.0  1          4        20       players 37/64

players of the node: 37, valid for 30 s
";
        assert_eq!(status_text(&status), expected);
    }

    #[test]
    fn unknown_load_is_said() {
        let status = NodeLoadStatus {
            node: "n1".to_owned(),
            ..NodeLoadStatus::default()
        };
        assert!(status_text(&status).contains("not known yet"));
    }
}
