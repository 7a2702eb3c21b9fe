//! `holdfast demo`: the product, shown on this machine.

use std::time::Duration;

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use holdfast_bench::cluster::Family;
use holdfast_bench::demo::migrate::{MigrateDemoSpec, MigrateScreen};
use holdfast_bench::demo::pool::{PoolDemoSpec, PoolScreen};
use holdfast_bench::demo::{DemoSpec, Screen};
use holdfast_lab::Reach;

use crate::Ending;
use crate::control::print_json;

/// See the product work, on this machine, in network namespaces. Needs root
///
/// Starts a small group of file servers and downloads through its service address with the system's own curl. While the
/// download runs, its connection goes round the servers. Ends with what the client saw: checksum, gaps, resets,
/// retransmissions, from a capture at the client's interface. Its programs run with real-time priority, so that what
/// else the machine does is not measured.
///
/// `holdfast demo pool` shows a pool of stock nginx servers, made elements by `holdfast pool register`, and a client that goes
/// on while a server and a registrar are killed. Of the flags, it heeds --nodes (the servers), --plain and --json.
///
/// `holdfast demo migrate` moves OpenArena's dedicated server, an ordinary program, from node to node and back while 24 players
/// play: 10 times, or --handoffs times. It needs the server's packages (`./x demo migrate` fetches them); HOLDFAST_OPENARENA names the
/// folder that they were unpacked into. Of the flags, it heeds --handoffs and --json.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  holdfast demo
  holdfast demo pool
  holdfast demo migrate
  holdfast demo --family 6 --reach broadcast
  holdfast demo --upload --bytes 134217728 --seconds 8 --json")]
pub struct DemoArgs {
    /// What to show
    #[arg(value_enum, default_value_t = What::Handoff)]
    what: What,
    /// How many nodes, or servers of the pool
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u16).range(2..=20))]
    nodes: u16,
    /// Over how many segments the nodes are spread; with more than one the client has its own
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=20))]
    segments: u16,
    /// How packets reach a flow's owner
    #[arg(long, value_enum, default_value_t = ReachArg::Steer)]
    reach: ReachArg,
    /// The internet protocol's version
    #[arg(long, default_value = "4", value_parser = ["4", "6"])]
    family: String,
    /// How much to transfer while the connection goes round
    #[arg(long, value_name = "BYTES", default_value_t = 1 << 30)]
    bytes: u64,
    /// How long that takes, at the rate the sender keeps to
    #[arg(long, value_name = "SECONDS", default_value_t = 17.0)]
    seconds: f64,
    /// From one handoff's begin to the next
    #[arg(long, value_name = "MS", default_value_t = 600)]
    every_ms: u64,
    /// Fail unless there were so many handoffs [default: 20, fewer where there is no time for them]; of `migrate`, how many
    /// moves to make [default: 10]
    #[arg(long, value_name = "N")]
    handoffs: Option<usize>,
    /// The client sends instead
    #[arg(long)]
    upload: bool,
    /// Lose packets on the client's link, in each direction, in percent
    #[arg(long, value_name = "PERCENT", default_value_t = 0.0)]
    loss_pct: f64,
    /// Lines instead of the live picture
    #[arg(long)]
    plain: bool,
    /// Print the report as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum What {
    /// A connection moves between servers
    Handoff,
    /// A pool of web servers, a server's death and a registrar's
    Pool,
    /// A game server moves between nodes while 24 players play
    Migrate,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ReachArg {
    /// The contact node forwards each flow to its owner
    Steer,
    /// Every node receives every packet
    Broadcast,
}

/// Carries out `holdfast demo`.
///
/// # Errors
/// Something kept it from coming to a result.
pub fn run(args: &DemoArgs) -> Result<Ending> {
    match args.what {
        What::Handoff => handoff(args),
        What::Pool => pool(args),
        What::Migrate => migrate(args),
    }
}

fn pool(args: &DemoArgs) -> Result<Ending> {
    let spec = PoolDemoSpec {
        elements: args.nodes,
        ..PoolDemoSpec::default()
    };
    let screen = PoolScreen::new(args.plain || args.json);
    let report = holdfast_bench::demo::pool::run(&spec, &|event| screen.show(event))?;
    end(args, &report, &report.text(), report.passed)
}

fn migrate(args: &DemoArgs) -> Result<Ending> {
    let mut spec = MigrateDemoSpec::default();
    spec.moves = args.handoffs.unwrap_or(spec.moves);
    let screen = MigrateScreen::default();
    let report = holdfast_bench::demo::migrate::run(&spec, &|event| screen.show(event))?;
    end(args, &report, &report.text(), report.passed)
}

fn handoff(args: &DemoArgs) -> Result<Ending> {
    let spec = spec(args)?;
    let screen = Screen::new(args.plain || args.json);
    let report = holdfast_bench::demo::run(&spec, &|event| screen.show(event))?;
    end(args, &report, &report.text(), report.passed)
}

fn end(
    args: &DemoArgs,
    report: &impl serde::Serialize,
    text: &str,
    passed: bool,
) -> Result<Ending> {
    if args.json {
        print_json(report)?;
    } else {
        print!("\n{text}");
    }
    Ok(if passed { Ending::Done } else { Ending::Failed })
}

fn spec(args: &DemoArgs) -> Result<DemoSpec> {
    if !(0.1..=86_400.0).contains(&args.seconds) {
        bail!("--seconds must be 0.1 to 86400, not {}", args.seconds);
    }
    let interval = Duration::from_millis(args.every_ms.max(1));
    let duration = Duration::from_secs_f64(args.seconds);
    // A third of the time is left for handoffs that take long on a busy machine.
    let room = (duration.as_secs_f64() / interval.as_secs_f64() * 2.0 / 3.0) as usize;
    Ok(DemoSpec {
        nodes: args.nodes,
        segments: args.segments,
        reach: match args.reach {
            ReachArg::Steer => Reach::Steer,
            ReachArg::Broadcast => Reach::Broadcast,
        },
        family: if args.family == "6" {
            Family::V6
        } else {
            Family::V4
        },
        bytes: args.bytes,
        control_bytes: (args.bytes / 8).max(1),
        duration,
        interval,
        handoffs_min: args.handoffs.unwrap_or(room.min(20)),
        upload: args.upload,
        loss_pct: args.loss_pct,
        ..DemoSpec::default()
    })
}
