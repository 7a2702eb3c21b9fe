//! `holdfast bench registrar`: the throughput of one registrar on one processor, beside a bare echo over the same
//! transport.
//!
//! The registrar is `rserpoold registrar`, alone on its processor; elements, users and the scope's other
//! registrars use another. The registrar's processor time comes from the clock of its process. A request counts as an
//! operation when its answer has arrived.

pub mod echo;
mod loads;
pub mod measurement_windows;
mod member_group;
mod messages;
mod report;
mod request_schedule;
mod role_process;
pub mod scope;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use holdfast_sctp::{SctpProvider, provider};
use holdfast_wire::rserpool::PolicyKind;

use echo::{EchoLoad, EchoRole, EchoRow};
use loads::{LoadSettings, RegistrarLoad};
use measurement_windows::WindowSchedule;
use member_group::MemberGroupArgs;
use report::RegistrarReport;
use scope::RegistrarTarget;

pub use member_group::MemberKind;

/// Flags of `holdfast bench registrar`.
#[derive(Debug, clap::Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "Examples:
  holdfast bench registrar --json registrar.json
  holdfast bench registrar --load paper-elements,paper-users --registrars 2
  holdfast bench registrar --external 127.0.0.1:3863 --pid 4711      another program's registrar"
)]
pub struct RegistrarArgs {
    /// Loads to measure, separated by commas; all by default.
    #[arg(long, value_delimiter = ',')]
    load: Vec<RegistrarLoad>,
    /// Registrars in the scope; several numbers, separated by commas.
    #[arg(long, value_delimiter = ',', default_value = "1,2,6")]
    registrars: Vec<u32>,
    /// Associations at saturation, each with one outstanding request; also of the echo.
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    associations: u32,
    /// Duration of each measurement in a round, milliseconds.
    #[arg(long, default_value_t = 2000, value_parser = clap::value_parser!(u64).range(1..))]
    milliseconds: u64,
    /// Rounds; the result is their median and range.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Policy of the pool: RR, WRR, RAND, WRAND or LU; with LU, the load changes with every re-registration.
    #[arg(long, default_value = "RR")]
    policy: PolicyKind,
    /// Elements requested per answer; by default the registrar's choice, 3.
    #[arg(long)]
    items: Option<u32>,
    /// Divide the paper's numbers of elements and users by this.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    divide: u32,
    /// Time for which the registrars collect requests, microseconds, instead of their own choice (`pause_us`).
    #[arg(long, value_name = "MICROSECONDS")]
    pause_us: Option<u32>,
    /// Use SCTP inside UDP even if the kernel has SCTP.
    #[arg(long)]
    udp: bool,
    /// Load this registrar of another program instead, at its ASAP address.
    #[arg(long, value_name = "ADDRESS:PORT", requires = "pid")]
    external: Option<SocketAddr>,
    /// UDP port of that registrar, for SCTP inside UDP.
    #[arg(long, value_name = "PORT", requires = "external", default_value_t = 0)]
    external_udp: u16,
    /// Process id of that registrar, on this machine.
    #[arg(long, requires = "external")]
    pid: Option<u32>,
    /// Write the rows to this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    #[command(subcommand)]
    part: Option<HiddenRole>,
}

/// Roles in which this program starts itself.
#[derive(Debug, clap::Subcommand)]
enum HiddenRole {
    /// A process of the bare echo.
    #[command(hide = true, subcommand)]
    Echo(EchoRole),
    /// A group of elements or users.
    #[command(hide = true)]
    Group(MemberGroupArgs),
    /// A program on one processor.
    #[command(hide = true)]
    Pinned {
        /// The processor.
        processor: usize,
        /// The program and its arguments.
        #[arg(last = true)]
        words: Vec<String>,
    },
}

/// Encapsulation of SCTP between the processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encapsulation {
    /// Directly over IP.
    Ip,
    /// Inside UDP (RFC 6951).
    Udp,
}

impl Encapsulation {
    /// Chooses IP if the kernel has SCTP and UDP is not requested. On a raw socket, libusrsctp would see the packets of
    /// all processes of this host.
    #[must_use]
    pub fn choose(udp_wanted: bool) -> Encapsulation {
        match provider() {
            SctpProvider::Kernel if !udp_wanted => Encapsulation::Ip,
            _ => Encapsulation::Udp,
        }
    }
}

/// Returns a command for this program in one of its hidden roles.
///
/// # Errors
/// The system does not tell the path of this program.
fn hidden_command(name: &str) -> Result<Command> {
    let mut command =
        Command::new(std::env::current_exe().context("find the path of this program")?);
    command.args(["bench", "registrar", name]);
    Ok(command)
}

/// Runs `holdfast bench registrar`, or one of its hidden roles.
///
/// # Errors
/// SCTP is missing, an association fails, or a request has no answer.
pub fn run(args: &RegistrarArgs) -> Result<()> {
    match &args.part {
        Some(HiddenRole::Echo(part)) => return echo::run_role(part),
        Some(HiddenRole::Group(group)) => return member_group::run(group),
        Some(HiddenRole::Pinned { processor, words }) => {
            return role_process::exec_pinned(*processor, words);
        }
        None => {}
    }
    ensure!(
        args.registrars.iter().all(|&registrars| registrars > 0),
        "--registrars must be at least 1"
    );
    let external = args
        .external
        .zip(args.pid)
        .map(|(server, pid)| RegistrarTarget {
            server,
            encapsulation: args.external_udp,
            pid,
        });
    let setting = args.load_settings(external);
    let mut report = RegistrarReport::new(role_process::transport_name());
    for (name, lengths) in setting.echo_lengths()? {
        let rows = args.measure_echo(lengths)?;
        report.add_echo(name, rows);
    }
    let scopes = match external {
        Some(_) => &[1][..],
        None => &args.registrars[..],
    };
    let of_load = |load: &RegistrarLoad| args.load.is_empty() || args.load.contains(load);
    for load in RegistrarLoad::ALL.iter().filter(|load| of_load(load)) {
        for &registrars in scopes {
            for row in setting.measure(*load, registrars as usize)? {
                report.add_row(row);
            }
        }
    }
    report.print_targets();
    match &args.json {
        Some(path) => report.write(path),
        None => Ok(()),
    }
}

impl RegistrarArgs {
    fn load_settings(&self, external: Option<RegistrarTarget>) -> LoadSettings {
        LoadSettings {
            external,
            carrier: Encapsulation::choose(self.udp),
            associations: self.associations as usize,
            divide: self.divide as usize,
            policy: self.policy,
            items: self.items,
            pause_us: self.pause_us,
            windows: WindowSchedule {
                settle: Duration::from_millis(self.milliseconds / 2),
                length: Duration::from_millis(self.milliseconds),
                count: self.rounds as usize,
            },
        }
    }

    fn measure_echo(&self, (request_len, response_len): (usize, usize)) -> Result<Vec<EchoRow>> {
        let load = EchoLoad {
            associations: self.associations as usize,
            window: 1,
            request_len,
            response_len,
            milliseconds: self.milliseconds,
            udp: Encapsulation::choose(self.udp) == Encapsulation::Udp,
        };
        let part = || hidden_command("echo");
        (0..self.rounds)
            .map(|_| echo::measure(&load, part))
            .collect()
    }
}
