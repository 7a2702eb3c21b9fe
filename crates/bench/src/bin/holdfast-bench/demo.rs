//! `holdfast demo`: demonstrates Holdfast on this machine.

use std::time::Duration;

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use holdfast_bench::demo::drain::{DrainDemoSpec, DrainDisplay};
use holdfast_bench::demo::migrate::{MigrateDemoSpec, MigrateDisplay};
use holdfast_bench::demo::pool::{PoolDemoSpec, PoolDisplay};
use holdfast_bench::demo::{DemoDisplay, DemoSpec};
use holdfast_lab::ServiceReach;
use holdfast_testbed::cluster::IpFamily;

/// Demonstrate Holdfast on this machine, in network namespaces. Needs root
///
/// Starts a small group of file servers and downloads through its service address with the system's curl. During the
/// download, the connection is handed from server to server. Finally prints the client's view: checksum, gaps, resets,
/// retransmissions, from a capture at the client's interface. The demonstration's programs run with real-time priority,
/// so that other load on the machine does not distort the result.
///
/// `holdfast demo pool` shows a pool of unmodified nginx servers, registered by `holdfast pool register`, and a
/// client that keeps working while a server and a registrar are killed. Of the flags, only --nodes (number of servers),
/// --plain and --json apply.
///
/// `holdfast demo migrate` moves OpenArena's dedicated server, an unmodified program, from node to node and back while
/// 24 players play: 10 times, or --handoffs times. The server's packages are required (`./x demo migrate` fetches
/// them); HOLDFAST_OPENARENA names the folder that contains them unpacked. Of the flags, only --handoffs and --json
/// apply.
///
/// `holdfast demo drain` runs twenty unmodified servers of four kinds on a group of five nodes: redis, nginx, a WebSocket
/// server, and OpenArena's server where HOLDFAST_OPENARENA names a folder that has it, else memcached. Clients compare
/// every byte of all answers while each node in turn is drained, its host is rebooted without a warning, and the node is
/// filled again. Of the flags, only --nodes-to-drain, --servers and --json apply.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  holdfast demo
  holdfast demo pool
  holdfast demo migrate
  holdfast demo drain
  holdfast demo drain --nodes-to-drain 2 --servers 2 --json
  holdfast demo --family 6 --reach broadcast
  holdfast demo --upload --bytes 134217728 --seconds 8 --json")]
pub struct DemoArgs {
    /// The demonstration
    #[arg(value_enum, default_value_t = Demonstration::Handoff)]
    demonstration: Demonstration,
    /// Number of nodes, or of servers in the pool
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u16).range(2..=20))]
    nodes: u16,
    /// Number of segments for the nodes; with more than one the client has its own segment
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=20))]
    segments: u16,
    /// How packets reach a flow's owner
    #[arg(long, value_enum, default_value_t = ReachArg::Steer)]
    reach: ReachArg,
    /// IP version
    #[arg(long, default_value = "4", value_parser = ["4", "6"])]
    family: String,
    /// Bytes to transfer during the handoffs
    #[arg(long, value_name = "BYTES", default_value_t = 1 << 30)]
    bytes: u64,
    /// Duration of the transfer, which sets the sender's rate
    #[arg(long, value_name = "SECONDS", default_value_t = 17.0)]
    seconds: f64,
    /// Interval between the starts of handoffs
    #[arg(long, value_name = "MS", default_value_t = 600)]
    every_ms: u64,
    /// Fail with fewer handoffs than this [default: 20, fewer if there is no time for them]; for `migrate`, the number
    /// of moves [default: 10]
    #[arg(long, value_name = "N")]
    handoffs: Option<usize>,
    /// Number of nodes that `drain` drains, reboots and fills again, of five
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..=5))]
    nodes_to_drain: u16,
    /// Number of servers of each kind for `drain`
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u16).range(2..=8))]
    servers: u16,
    /// Upload from the client instead of downloading
    #[arg(long)]
    upload: bool,
    /// Packet loss on the client's link, in each direction, in percent
    #[arg(long, value_name = "PERCENT", default_value_t = 0.0)]
    loss_pct: f64,
    /// Print lines instead of the live display
    #[arg(long)]
    plain: bool,
    /// Print the report as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Demonstration {
    /// A connection moves between servers
    Handoff,
    /// A pool of web servers survives the death of a server and of a registrar
    Pool,
    /// A game server moves between nodes while 24 players play
    Migrate,
    /// Each node of a group with twenty servers is drained, rebooted and filled again
    Drain,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ReachArg {
    /// The contact node forwards each flow to its owner
    Steer,
    /// Every node receives every packet
    Broadcast,
}

/// Runs `holdfast demo`. Returns false if the demonstration did not keep its promise.
///
/// # Errors
/// The demonstration could not be completed.
pub fn run(args: &DemoArgs) -> Result<bool> {
    match args.demonstration {
        Demonstration::Handoff => run_handoff_demo(args),
        Demonstration::Pool => run_pool_demo(args),
        Demonstration::Migrate => run_migrate_demo(args),
        Demonstration::Drain => run_drain_demo(args),
    }
}

fn run_pool_demo(args: &DemoArgs) -> Result<bool> {
    let spec = PoolDemoSpec {
        elements: args.nodes,
        ..PoolDemoSpec::default()
    };
    let screen = PoolDisplay::new(args.plain || args.json);
    let report = holdfast_bench::demo::pool::run(&spec, &|event| screen.show(event))?;
    report_result(args, &report, &report.text(), report.passed)
}

fn run_migrate_demo(args: &DemoArgs) -> Result<bool> {
    let mut spec = MigrateDemoSpec::default();
    spec.moves = args.handoffs.unwrap_or(spec.moves);
    let screen = MigrateDisplay::default();
    let report = holdfast_bench::demo::migrate::run(&spec, &|event| screen.show(event))?;
    report_result(args, &report, &report.text(), report.passed)
}

fn run_drain_demo(args: &DemoArgs) -> Result<bool> {
    let spec = DrainDemoSpec {
        nodes_to_drain: args.nodes_to_drain,
        servers_per_kind: args.servers,
        ..DrainDemoSpec::default()
    };
    let screen = DrainDisplay::default();
    let report = holdfast_bench::demo::drain::run(&spec, &|event| screen.show(event))?;
    report_result(args, &report, &report.text(), report.passed)
}

fn run_handoff_demo(args: &DemoArgs) -> Result<bool> {
    let spec = handoff_demo_spec(args)?;
    let screen = DemoDisplay::new(args.plain || args.json);
    let report = holdfast_bench::demo::run(&spec, &|event| screen.show(event))?;
    report_result(args, &report, &report.text(), report.passed)
}

fn report_result(
    args: &DemoArgs,
    report: &impl serde::Serialize,
    text: &str,
    passed: bool,
) -> Result<bool> {
    if args.json {
        println!("{}", serde_json::to_string_pretty(report)?);
    } else {
        print!("\n{text}");
    }
    Ok(passed)
}

fn handoff_demo_spec(args: &DemoArgs) -> Result<DemoSpec> {
    if !(0.1..=86_400.0).contains(&args.seconds) {
        bail!("--seconds must be 0.1 to 86400, not {}", args.seconds);
    }
    let interval = Duration::from_millis(args.every_ms.max(1));
    let duration = Duration::from_secs_f64(args.seconds);
    // Leave a third of the time for handoffs that take long on a busy machine.
    let handoffs_possible = (duration.as_secs_f64() / interval.as_secs_f64() * 2.0 / 3.0) as usize;
    Ok(DemoSpec {
        nodes: args.nodes,
        segments: args.segments,
        reach: match args.reach {
            ReachArg::Steer => ServiceReach::Steer,
            ReachArg::Broadcast => ServiceReach::Broadcast,
        },
        family: if args.family == "6" {
            IpFamily::V6
        } else {
            IpFamily::V4
        },
        bytes: args.bytes,
        control_bytes: (args.bytes / 8).max(1),
        duration,
        interval,
        handoffs_min: args.handoffs.unwrap_or(handoffs_possible.min(20)),
        upload: args.upload,
        loss_pct: args.loss_pct,
        ..DemoSpec::default()
    })
}
