//! `holdfast pool register`: registers any program as an element of a pool.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use clap::{Args, ValueEnum};
use holdfast_api::control::PolicyDetail;
use holdfast_api::pool::{DeregistrationResult, ElementEvent, ElementService, RegistrationRequest};
use nix::sys::signal::Signal;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::timeout;

use super::load_meter::{LoadReceiver, LoadSourceArg, parse_share};
use super::maintained_registration::{ElementReport, MaintainedRegistration};
use super::program_process::{ProgramProcess, wait_listening};
use super::temporary_daemon::{PoolDaemonArgs, RunningDaemon};
use crate::ExitResult;

/// Maximum time for the registrar to confirm a deregistration.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(5);
/// Minimum change of the load that is reported.
const LOAD_CHANGE_MIN: f64 = 0.005;

/// Register any program as an element of a pool for as long as it runs
///
/// Starts the unmodified program, waits until its TCP port answers (not for UDP and SCTP ports), registers it and
/// keeps it registered. The element leaves the pool when the program ends, or on SIGTERM or SIGINT, which is then
/// passed to the program. The exit code is the program's, or 128 plus the number of the signal that killed it.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  holdfast pool register --handle web --policy RR -- nginx -g 'daemon off;'
  holdfast pool register --handle web --policy LU --load cpu -- ./server --port 8080
  holdfast pool register --handle web --policy LU-DPF --load 'cmd:./load.sh' --load-dpf 0.001 --registrar 10.0.0.1 -- ./server
  holdfast pool register --handle dns --policy WRR --weight 3 --transport udp --port 53 -- ./resolver")]
pub struct RegisterArgs {
    #[command(flatten)]
    daemon: PoolDaemonArgs,
    /// The pool's handle
    #[arg(long)]
    handle: String,
    /// The pool's policy: RR, WRR, RAND, WRAND, PRIO, LU, LUD, PLU, PLUD, RLU, RLUD, RPLU, RPLUD, WRAND-DPF, LU-DPF,
    /// LUD-DPF, PLU-DPF, PLUD-DPF
    #[arg(long, default_value = "RR")]
    policy: String,
    /// Weight: relative share of the sessions, for policies with weights [default: 1]
    #[arg(long, value_name = "N")]
    weight: Option<u32>,
    /// Priority for PRIO: elements of higher priority are chosen first [default: 0]
    #[arg(long, value_name = "N")]
    priority: Option<u32>,
    /// The load, for policies with one: cpu (the program's processor time), cmd:COMMAND (the command's output), or a
    /// fixed value. As 0 to 1 or in percent [default: 0]
    #[arg(long, value_name = "cpu|cmd:COMMAND|LOAD")]
    load: Option<LoadSourceArg>,
    /// Increase of the load by one more session, 0 to 1 or in percent
    #[arg(long, value_name = "SHARE", value_parser = parse_share)]
    load_degradation: Option<f64>,
    /// Increase of the load (or decrease of the weight) per millisecond of distance, 0 to 1 or in percent, for the DPF
    /// policies
    #[arg(long, value_name = "SHARE", value_parser = parse_share)]
    load_dpf: Option<f64>,
    /// Seconds between measurements of the load
    #[arg(long, value_name = "S", default_value_t = 1.0)]
    every: f64,
    /// Transport protocol of the program's service
    #[arg(long, value_enum, default_value_t)]
    transport: TransportArg,
    /// Address for users [default: the listening address, otherwise the address used towards the registrar]
    #[arg(long, value_name = "ADDRESS")]
    address: Option<IpAddr>,
    /// Port for users; required for UDP and SCTP [default: the listening port]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    port: Option<u16>,
    /// Lifetime of a registration, in seconds [default: 300]
    #[arg(long, value_name = "S", value_parser = clap::value_parser!(u32).range(1..))]
    life: Option<u32>,
    /// Maximum time until the program's port answers, in seconds
    #[arg(long, value_name = "S", default_value_t = 60)]
    wait: u64,
    /// The program and its arguments
    #[arg(last = true, required = true, value_name = "PROGRAM")]
    program: Vec<String>,
}

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum TransportArg {
    #[default]
    Tcp,
    Udp,
    Sctp,
}

/// Runs `holdfast pool register`.
///
/// # Errors
/// The program or the daemon does not start, the program's port does not answer, or the registrar refuses.
pub fn run(args: &RegisterArgs) -> Result<ExitResult> {
    if !(0.01..=86_400.0).contains(&args.every) {
        bail!("--every must be 0.01 to 86400, not {}", args.every);
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let status = runtime.block_on(run_program(args))?;
    Ok(ExitResult::Exited(exit_code(status)))
}

fn exit_code(status: ExitStatus) -> u8 {
    let code = status
        .code()
        .or_else(|| status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1)
}

/// Waits for SIGTERM or SIGINT.
struct StopSignals([tokio::signal::unix::Signal; 2]);

impl StopSignals {
    fn new() -> Result<StopSignals> {
        let [terminate, interrupt] = [SignalKind::terminate(), SignalKind::interrupt()].map(signal);
        Ok(StopSignals([terminate?, interrupt?]))
    }

    async fn wait(&mut self) -> Signal {
        let [terminate, interrupt] = &mut self.0;
        tokio::select! {
            _ = terminate.recv() => Signal::SIGTERM,
            _ = interrupt.recv() => Signal::SIGINT,
        }
    }
}

async fn run_program(args: &RegisterArgs) -> Result<ExitStatus> {
    let mut stop = StopSignals::new()?;
    let daemon = args.daemon.find_or_start()?;
    let mut program = ProgramProcess::start(&args.program)?;
    let group = program.group();
    let source = args.load.clone().unwrap_or(LoadSourceArg::Fixed(0.0));
    let mut loads = LoadReceiver::start(source, group, Duration::from_secs_f64(args.every));
    let started = tokio::select! {
        started = find_service_and_load(args, group, &mut loads) => started,
        status = program.wait_end() => return status,
        asked = stop.wait() => {
            program.signal(asked);
            return program.wait_end().await;
        }
    };
    let result = match started {
        Ok(started) => keep_registered(args, daemon, started, loads, &mut program, &mut stop).await,
        Err(error) => Err(error),
    };
    if result.is_err() {
        // Without a pool, the program must not keep running.
        program.signal(Signal::SIGTERM);
        let _ = program.wait_end().await;
    }
    result
}

/// Waits until the program answers; returns its service address and its load.
async fn find_service_and_load(
    args: &RegisterArgs,
    group: i32,
    loads: &mut LoadReceiver,
) -> Result<(ElementService, f64)> {
    let service = find_service(args, group).await?;
    let load = loads
        .next_load()
        .await
        .context("the load cannot be determined")?;
    Ok((service, load))
}

/// Waits until the program answers; returns its service address.
async fn find_service(args: &RegisterArgs, group: i32) -> Result<ElementService> {
    let wildcard = args.address.unwrap_or(Ipv4Addr::UNSPECIFIED.into());
    let port = || {
        args.port.ok_or_else(|| {
            anyhow!(
                "give the port of the program with --port; only TCP ports are found automatically"
            )
        })
    };
    Ok(match args.transport {
        TransportArg::Tcp => {
            let limit = Duration::from_secs(args.wait);
            let accepts = wait_listening(group, args.address, args.port);
            let at = timeout(limit, accepts).await.map_err(|_| {
                let hint =
                    "give the port with --port if another process listens, or wait longer with --wait";
                anyhow!(
                    "the program accepts no connection after {} s; {hint}",
                    args.wait
                )
            })?;
            ElementService::Tcp(at?)
        }
        TransportArg::Udp => ElementService::Udp(SocketAddr::new(wildcard, port()?)),
        TransportArg::Sctp => ElementService::Sctp(vec![SocketAddr::new(wildcard, port()?)]),
    })
}

fn print_note(handle: &str, note: &str) {
    eprintln!("holdfast: {handle}: {note}");
}

/// Keeps the program registered until it ends.
async fn keep_registered(
    args: &RegisterArgs,
    daemon: RunningDaemon,
    (service, load): (ElementService, f64),
    mut loads: LoadReceiver,
    program: &mut ProgramProcess,
    stop: &mut StopSignals,
) -> Result<ExitStatus> {
    let mut policy = policy_detail(args);
    policy.load = args.load.as_ref().map(|_| load);
    let registration = RegistrationRequest {
        policy: policy.clone(),
        life_ms: args.life.map(|seconds| u64::from(seconds) * 1000),
        ..RegistrationRequest::new(&args.handle, service.clone())
    };
    let mut maintained = MaintainedRegistration::start(args.daemon.clone(), daemon, registration);
    let mut load_unknown = None;
    loop {
        tokio::select! {
            status = program.wait_end() => {
                deregister(&args.handle, maintained).await;
                return status;
            }
            asked = stop.wait() => {
                // Deregister first, so that no new users arrive, and then end the program.
                deregister(&args.handle, maintained).await;
                program.signal(asked);
                return program.wait_end().await;
            }
            told = maintained.next_report() => match told {
                ElementReport::Event(event) => print_event(&args.handle, &service, event),
                ElementReport::Retrying(what) => print_note(&args.handle, &format!("{what}; trying again")),
                ElementReport::Failed(error) => return Err(error.context(args.handle.clone())),
            },
            load = loads.next_load() => match load {
                Ok(load) => {
                    load_unknown = None;
                    if (load - policy.load.unwrap_or(0.0)).abs() >= LOAD_CHANGE_MIN {
                        policy.load = Some(load);
                        maintained.set_policy(&policy);
                    }
                }
                Err(error) => {
                    let problem = format!("the load cannot be determined: {error:#}");
                    if load_unknown.as_ref() != Some(&problem) {
                        print_note(&args.handle, &problem);
                        load_unknown = Some(problem);
                    }
                }
            },
        }
    }
}

/// Leaves the pool, and waits for the confirmation.
async fn deregister(handle: &str, maintained: MaintainedRegistration) {
    match timeout(LEAVE_TIMEOUT, maintained.leave()).await {
        Ok(None) => {}
        Ok(Some(DeregistrationResult::Confirmed)) => print_note(handle, "has left the pool"),
        Ok(Some(DeregistrationResult::Refused { reason })) => {
            print_note(handle, &format!("still registered: {reason}"))
        }
        Ok(Some(DeregistrationResult::TimedOut)) | Err(_) => print_note(
            handle,
            "no registrar confirmed the deregistration; the element may be listed for a while",
        ),
    }
}

fn policy_detail(args: &RegisterArgs) -> PolicyDetail {
    PolicyDetail {
        name: args.policy.clone(),
        weight: args.weight,
        priority: args.priority,
        load: None,
        degradation: args.load_degradation,
        delay_penalty: args.load_dpf,
        distance_ms: None,
    }
}

/// Prints an event of the pool element on standard error.
fn print_event(handle: &str, service: &ElementService, event: ElementEvent) {
    match event {
        ElementEvent::Registered {
            id,
            addresses: at,
            warnings,
        } => {
            print_note(handle, &registered_text(&id, service, &at));
            for warning in warnings {
                print_note(handle, &format!("the registrar warns: {warning}"));
            }
        }
        ElementEvent::Expired => print_note(handle, "the registration has expired; trying again"),
        ElementEvent::Home { registrar } => {
            let registrar = registrar.map_or(String::new(), |id| format!(" {id}"));
            print_note(handle, &format!("registrar{registrar} answers"));
        }
        ElementEvent::HomeLost => print_note(handle, "the registrar is lost; looking for another"),
        ElementEvent::NoRegistrar => print_note(
            handle,
            "no registrar answers; trying again (start one with `holdfast registrar`)",
        ),
        ElementEvent::Refused { .. }
        | ElementEvent::Deregistered(_)
        | ElementEvent::Connected { .. }
        | ElementEvent::Resumed { .. }
        | ElementEvent::Data { .. }
        | ElementEvent::Closed { .. } => {}
    }
}

fn registered_text(id: &str, service: &ElementService, addresses: &[SocketAddr]) -> String {
    let transport = match service {
        ElementService::Tcp(_) => "tcp",
        ElementService::Udp(_) => "udp",
        ElementService::Sctp(_) | ElementService::Sessions { .. } => "sctp",
    };
    let mut text = format!("registered as {id}, {transport}");
    for at in addresses {
        text += &format!(" {at}");
    }
    if addresses.iter().all(|at| at.ip().is_loopback()) {
        text += ": only users on this host can reach this address; give one for other users with --address";
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unreachable_loopback_address_is_warned_about() {
        let service = ElementService::Tcp("0.0.0.0:80".parse().unwrap());
        let text = |at: &str| registered_text("1", &service, &[at.parse().unwrap()]);
        assert_eq!(text("10.0.0.1:80"), "registered as 1, tcp 10.0.0.1:80");
        assert!(text("127.0.0.1:80").contains("--address"));
    }
}
