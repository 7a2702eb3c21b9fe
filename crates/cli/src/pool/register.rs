//! `holdfast pool register`: makes any program an element of a pool.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, anyhow, bail};
use clap::{Args, ValueEnum};
use holdfast_api::control::PolicyDetail;
use holdfast_api::pool::{Departure, Element, ElementEvent, Registration, Service};
use nix::sys::signal::Signal;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};

use super::child::{Program, accepts};
use super::daemon::{PoolDaemon, Running};
use super::load::{Meter, Source, share};
use crate::Ending;

/// How long the registrar may take to confirm that the element leaves.
const LEAVE: Duration = Duration::from_secs(5);
/// From one attempt to reach a daemon that has gone to the next.
const AGAIN: Duration = Duration::from_secs(1);
/// A load that has changed by less is not told.
const CHANGE: f64 = 0.005;

/// Make any program an element of a pool, as long as it runs
///
/// Starts the program unmodified, waits until its port answers, registers it and keeps it registered. It leaves the pool when it
/// ends, or on SIGTERM or SIGINT, which it is then given. Ends as the program does: its exit code, 128 and the number of a
/// signal that killed it.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  holdfast pool register --handle web --policy RR -- nginx -g 'daemon off;'
  holdfast pool register --handle web --policy LU --load cpu -- ./server --port 8080
  holdfast pool register --handle web --policy LU-DPF --load 'cmd:./load.sh' --load-dpf 0.001 --registrar 10.0.0.1 -- ./server
  holdfast pool register --handle dns --policy WRR --weight 3 --transport udp --port 53 -- ./resolver")]
pub struct RegisterArgs {
    #[command(flatten)]
    daemon: PoolDaemon,
    /// The pool's handle
    #[arg(long)]
    handle: String,
    /// The pool's policy: RR, WRR, RAND, WRAND, PRIO, LU, LUD, PLU, PLUD, RLU, RLUD, RPLU, RPLUD, WRAND-DPF, LU-DPF, LUD-DPF,
    /// PLU-DPF, PLUD-DPF
    #[arg(long, default_value = "RR")]
    policy: String,
    /// Share of the sessions, for policies with weights [default: 1]
    #[arg(long, value_name = "N")]
    weight: Option<u32>,
    /// The higher, the sooner chosen, for PRIO [default: 0]
    #[arg(long, value_name = "N")]
    priority: Option<u32>,
    /// The load, for policies with one: cpu (the program's processor time), cmd:COMMAND (what it prints), or a fixed one. As 0 to 1 or
    /// in percent [default: 0]
    #[arg(long, value_name = "cpu|cmd:COMMAND|LOAD")]
    load: Option<Source>,
    /// What one more session adds to the load, 0 to 1 or in percent
    #[arg(long, value_name = "SHARE", value_parser = share)]
    load_degradation: Option<f64>,
    /// What a millisecond of distance adds to the load or takes from the weight, 0 to 1 or in percent, for the DPF policies
    #[arg(long, value_name = "SHARE", value_parser = share)]
    load_dpf: Option<f64>,
    /// Seconds from one look at the load to the next
    #[arg(long, value_name = "S", default_value_t = 1.0)]
    every: f64,
    /// What users speak to the program
    #[arg(long, value_enum, default_value_t)]
    transport: Transport,
    /// Where users reach it [default: where it listens, else the address that the registrar is reached from]
    #[arg(long, value_name = "ADDRESS")]
    address: Option<IpAddr>,
    /// Its port; needed for UDP and SCTP [default: the one it listens at]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    port: Option<u16>,
    /// Seconds that a registration holds [default: 300]
    #[arg(long, value_name = "S", value_parser = clap::value_parser!(u32).range(1..))]
    life: Option<u32>,
    /// Seconds that the program may take until its port answers
    #[arg(long, value_name = "S", default_value_t = 60)]
    wait: u64,
    /// The program and its arguments
    #[arg(last = true, required = true, value_name = "PROGRAM")]
    program: Vec<String>,
}

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum Transport {
    #[default]
    Tcp,
    Udp,
    Sctp,
}

/// Carries out `holdfast pool register`.
///
/// # Errors
/// The program or the daemon does not start, its port does not answer, or the registrar refuses.
pub fn run(args: &RegisterArgs) -> Result<Ending> {
    if !(0.01..=86_400.0).contains(&args.every) {
        bail!("--every must be 0.01 to 86400, not {}", args.every);
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let status = runtime.block_on(serve(args))?;
    Ok(Ending::Exited(exit_code(status)))
}

fn exit_code(status: ExitStatus) -> u8 {
    let code = status
        .code()
        .or_else(|| status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1)
}

/// Waits for SIGTERM or SIGINT.
struct Stop([tokio::signal::unix::Signal; 2]);

impl Stop {
    fn new() -> Result<Stop> {
        let [terminate, interrupt] = [SignalKind::terminate(), SignalKind::interrupt()].map(signal);
        Ok(Stop([terminate?, interrupt?]))
    }

    async fn asked(&mut self) -> Signal {
        let [terminate, interrupt] = &mut self.0;
        tokio::select! {
            _ = terminate.recv() => Signal::SIGTERM,
            _ = interrupt.recv() => Signal::SIGINT,
        }
    }
}

async fn serve(args: &RegisterArgs) -> Result<ExitStatus> {
    let mut stop = Stop::new()?;
    let daemon = args.daemon.reach()?;
    let mut program = Program::start(&args.program)?;
    let group = program.group();
    let started = tokio::select! {
        service = service(args, group) => service,
        status = program.ended() => return status,
        asked = stop.asked() => {
            program.signal(asked);
            return program.ended().await;
        }
    };
    let kept = match started {
        Ok(service) => keep(args, daemon, service, &mut program, &mut stop).await,
        Err(error) => Err(error),
    };
    if kept.is_err() {
        // It would run on without a pool.
        program.signal(Signal::SIGTERM);
        let _ = program.ended().await;
    }
    kept
}

/// Where users reach the program, once it answers.
async fn service(args: &RegisterArgs, group: i32) -> Result<Service> {
    let any = args.address.unwrap_or(Ipv4Addr::UNSPECIFIED.into());
    let port = || {
        args.port.ok_or_else(|| {
            anyhow!("say with --port where the program is; only TCP ports are found")
        })
    };
    Ok(match args.transport {
        Transport::Tcp => {
            let limit = Duration::from_secs(args.wait);
            let accepts = accepts(group, args.address, args.port);
            let at = timeout(limit, accepts).await.map_err(|_| {
                let hint =
                    "is it the one that listens? Say where with --port, or wait longer with --wait";
                anyhow!(
                    "the program accepts no connection after {} s; {hint}",
                    args.wait
                )
            })?;
            Service::Tcp(at?)
        }
        Transport::Udp => Service::Udp(SocketAddr::new(any, port()?)),
        Transport::Sctp => Service::Sctp(vec![SocketAddr::new(any, port()?)]),
    })
}

/// An element at the daemon, and what happens to it.
struct Registered {
    element: Arc<Element>,
    events: mpsc::UnboundedReceiver<ElementEvent>,
}

impl Registered {
    fn new(daemon: &Running, registration: Registration) -> Result<Registered> {
        let element = Arc::new(Element::register(daemon.programs(), registration)?);
        let (sender, events) = mpsc::unbounded_channel();
        let source = element.clone();
        std::thread::spawn(move || {
            loop {
                match source.next() {
                    Ok(Some(event)) => {
                        if sender.send(event).is_err() {
                            return;
                        }
                    }
                    Ok(None) => return,
                    Err(error) => {
                        // In the daemon's words: what was wrong with what was said.
                        let reason = error.to_string();
                        let _ = sender.send(ElementEvent::Refused { reason });
                        return;
                    }
                }
            }
        });
        Ok(Registered { element, events })
    }

    /// Leaves the pool, and waits until that is confirmed.
    async fn leave(mut self, handle: &str) {
        let left = async {
            while let Some(event) = self.events.recv().await {
                if let ElementEvent::Left(departure) = event {
                    return departure;
                }
            }
            Departure::TimedOut
        };
        if self.element.deregister().is_err() {
            return;
        }
        match timeout(LEAVE, left).await {
            Ok(Departure::Confirmed) => say(handle, "has left the pool"),
            Ok(Departure::Refused { reason }) => say(handle, &format!("still there: {reason}")),
            Ok(Departure::TimedOut) | Err(_) => say(
                handle,
                "no registrar confirmed that it left; it may be listed for a while",
            ),
        }
    }
}

fn say(handle: &str, what: &str) {
    eprintln!("holdfast: {handle}: {what}");
}

/// Keeps the program registered until it ends.
async fn keep(
    args: &RegisterArgs,
    mut daemon: Running,
    service: Service,
    program: &mut Program,
    stop: &mut Stop,
) -> Result<ExitStatus> {
    let source = args.load.clone().unwrap_or(Source::Fixed(0.0));
    let mut meter = Meter::new(source, program.group());
    let mut policy = policy(args);
    if args.load.is_some() {
        policy.load = Some(meter.read().await?);
    }
    let registration = |policy: &PolicyDetail| Registration {
        policy: policy.clone(),
        life_ms: args.life.map(|seconds| u64::from(seconds) * 1000),
        ..Registration::new(&args.handle, service.clone())
    };
    let mut registered = Registered::new(&daemon, registration(&policy))?;
    let mut looks = interval(Duration::from_secs_f64(args.every));
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            status = program.ended() => {
                registered.leave(&args.handle).await;
                return status;
            }
            asked = stop.asked() => {
                // First no new users, then the end.
                registered.leave(&args.handle).await;
                program.signal(asked);
                return program.ended().await;
            }
            event = registered.events.recv() => match event {
                Some(event) => told(&args.handle, &service, event)?,
                None => {
                    say(&args.handle, "the pool daemon is gone; looking for one");
                    sleep(AGAIN).await;
                    if !daemon.is_there() {
                        daemon = args.daemon.reach()?;
                    }
                    registered = Registered::new(&daemon, registration(&policy))?;
                }
            },
            _ = looks.tick(), if meter.changes() => {
                update(&args.handle, &mut meter, &mut policy, &registered).await;
            }
        }
    }
}

async fn update(
    handle: &str,
    meter: &mut Meter,
    policy: &mut PolicyDetail,
    registered: &Registered,
) {
    match meter.read().await {
        Ok(load) if (load - policy.load.unwrap_or(0.0)).abs() >= CHANGE => {
            policy.load = Some(load);
            // If the daemon is gone, its events say so.
            let _ = registered.element.set_policy(policy.clone());
        }
        Ok(_) => {}
        Err(error) => say(handle, &format!("the load is not known: {error:#}")),
    }
}

fn policy(args: &RegisterArgs) -> PolicyDetail {
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

/// Says what happened.
fn told(handle: &str, service: &Service, event: ElementEvent) -> Result<()> {
    match event {
        ElementEvent::Registered { id, warnings } => {
            say(handle, &format!("registered as {id}, {}", words(service)));
            for warning in warnings {
                say(handle, &format!("the registrar warns: {warning}"));
            }
        }
        ElementEvent::Refused { reason } => bail!("{handle}: {reason}"),
        ElementEvent::Expired => say(handle, "the registration has expired; trying again"),
        ElementEvent::Home { registrar } => {
            let registrar = registrar.map_or(String::new(), |id| format!(" {id}"));
            say(handle, &format!("registrar{registrar} answers"));
        }
        ElementEvent::HomeLost => say(handle, "its registrar is lost; looking for another"),
        ElementEvent::NoRegistrar => say(
            handle,
            "no registrar answers; trying again (start one with `holdfast registrar`)",
        ),
        ElementEvent::Left(_)
        | ElementEvent::Connected { .. }
        | ElementEvent::Resumed { .. }
        | ElementEvent::Data { .. }
        | ElementEvent::Closed { .. } => {}
    }
    Ok(())
}

fn words(service: &Service) -> String {
    match service {
        Service::Tcp(at) => format!("tcp port {}", at.port()),
        Service::Udp(at) => format!("udp port {}", at.port()),
        Service::Sctp(at) => format!("sctp port {}", at.first().map_or(0, SocketAddr::port)),
        Service::Sessions { .. } => "sessions".to_owned(),
    }
}
