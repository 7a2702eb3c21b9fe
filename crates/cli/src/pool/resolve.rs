//! `holdfast pool resolve`: a registrar's selection of elements of a pool.

use anyhow::Result;
use clap::Args;
use holdfast_api::control::{Resolution, ResolveQuery, UnreachableReport};

use super::temporary_daemon::PoolDaemonArgs;
use super::{policy_text, service_text};

use crate::output::{output, print_json};
use crate::table::TextTable;

/// Resolve a pool's handle: print elements in the order in which to use them
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  holdfast pool resolve web
  holdfast pool resolve web -n 1 --json
  holdfast pool resolve web --registrar 10.0.0.1
  holdfast pool resolve web --report-unreachable 1a2b3c4d")]
pub struct ResolveArgs {
    #[command(flatten)]
    daemon: PoolDaemonArgs,
    /// The pool's handle
    handle: String,
    /// Maximum number of elements [default: as many as the registrar gives]
    #[arg(short = 'n', long = "items", value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    items: Option<u32>,
    /// Accept the host daemon's cached answer of the last seconds
    #[arg(long)]
    cached: bool,
    /// Report that this element could not be reached; repeatable
    #[arg(long, value_name = "ID")]
    report_unreachable: Vec<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs `holdfast pool resolve`.
///
/// # Errors
/// No registrar answers, or the pool does not exist.
pub fn run(args: &ResolveArgs) -> Result<()> {
    let daemon = args.daemon.find_or_start()?;
    let client = daemon.client()?;
    let query = ResolveQuery {
        items: args.items,
        cached: Some(args.cached),
    };
    let resolution = client.run(|client| client.resolve(&args.handle, &query))?;
    for id in &args.report_unreachable {
        let report = UnreachableReport {
            handle: args.handle.clone(),
            id: id.clone(),
        };
        client.run(|client| client.report_unreachable(&report))?;
        eprintln!("holdfast: {}: reported {id} as unreachable", args.handle);
    }
    if args.json {
        return print_json(&resolution);
    }
    output!("{}", resolution_text(&resolution));
    Ok(())
}

fn resolution_text(resolution: &Resolution) -> String {
    let mut table = TextTable::new(["element", "service", "policy"]);
    for element in &resolution.elements {
        table.row([
            element.id.clone(),
            service_text(element),
            policy_text(&element.policy),
        ]);
    }
    format!(
        "pool {}, {}\n\n{}",
        resolution.handle,
        resolution.policy,
        table.text()
    )
}
