//! `holdfastd`: the daemon of a node, a registrar, or a pool daemon.
#![forbid(unsafe_code)]

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, ValueEnum};
use holdfast_node::config::pool::{PoolConfig, RegistrarAddress};
use holdfast_node::config::registrar::{RegistrarConfig, RegistrarPeer};
use holdfast_node::config::{Config, LogConfig, TlsConfig};
use holdfast_node::pid_file::PidFile;
use holdfast_node::{engine, logs, migration, pool, registrar};

/// Default path of a node's configuration.
const CONFIG: &str = "/etc/holdfast/holdfast.toml";

/// The daemon of Holdfast. A node owns service addresses, keeps connections alive and hands them off to other nodes; a
/// registrar keeps the elements of the scope's pools; a pool daemon communicates with registrars for the programs of
/// its host.
#[derive(Parser)]
#[command(
    name = "holdfastd",
    version,
    after_help = "Example: holdfastd --config /etc/holdfast/holdfast.toml"
)]
struct Arguments {
    /// Role of the daemon.
    #[arg(long, value_enum, default_value_t)]
    role: DaemonRole,
    /// Configuration file. A node's default is /etc/holdfast/holdfast.toml; the other roles need none.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Only check the configuration.
    #[arg(long)]
    check: bool,
    /// Address of a registrar or pool daemon, instead of the file's addresses; may be repeated.
    #[arg(long, value_name = "ADDRESS")]
    listen: Vec<IpAddr>,
    /// Another registrar to contact at the start, in addition to the registrars in the file; may be repeated.
    #[arg(long, value_name = "ADDRESS[:PORT]", value_parser = RegistrarPeer::parse)]
    peer: Vec<RegistrarPeer>,
    #[arg(
        long,
        value_name = "REGISTRAR",
        help = "Registrar for a pool daemon, instead of the file's registrars; may be repeated. Written as \
                ADDRESS[:PORT], tcp://ADDRESS[:PORT] or tls://[NAME@]ADDRESS[:PORT]"
    )]
    registrar: Vec<RegistrarAddress>,
    /// The group's authority, for a pool daemon's registrars over TLS; with --tls-cert and --tls-key instead of the
    /// file's section `tls`.
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_ca: Option<PathBuf>,
    /// The pool daemon's certificate.
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// The pool daemon's private key.
    #[arg(long, value_name = "FILE", requires = "tls_ca")]
    tls_key: Option<PathBuf>,
    /// The authority's revocation list.
    #[arg(long, value_name = "FILE", requires = "tls_ca")]
    tls_crl: Option<PathBuf>,
    /// Let a pool daemon trust registrars that announce themselves by multicast.
    #[arg(long)]
    announces: bool,
    /// End a pool daemon when its standard input ends.
    #[arg(long)]
    with_parent: bool,
    /// Directory of a registrar's or pool daemon's sockets, instead of the file's.
    #[arg(long, value_name = "DIRECTORY")]
    run_dir: Option<PathBuf>,
    /// Log filter of a registrar or pool daemon, such as `warn`, instead of the file's.
    #[arg(long, value_name = "FILTER")]
    log: Option<String>,
}

#[derive(Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
enum DaemonRole {
    #[default]
    Node,
    Registrar,
    Pool,
}

fn main() -> ExitCode {
    // The restorer of processes that move here is this program too, started by the daemon.
    if std::env::args_os()
        .nth(1)
        .is_some_and(|word| word == migration::RESTORER_ARG)
    {
        std::process::exit(holdfast_checkpoint::acceptor::run_restorer());
    }
    let arguments = Arguments::parse();
    let ended = match arguments.role {
        DaemonRole::Node => run_node(&arguments),
        DaemonRole::Registrar => run_registrar(&arguments),
        DaemonRole::Pool => run_pool(&arguments),
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("holdfastd: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run_registrar(arguments: &Arguments) -> Result<(), Box<dyn std::error::Error>> {
    let mut config = RegistrarConfig::load(arguments.config.as_deref())?;
    arguments.apply_overrides(&mut config.listen, &mut config.run_dir, &mut config.log);
    config.peers.extend_from_slice(&arguments.peer);
    config.check(arguments.config_source())?;
    match arguments.should_run("registrar", &config.log)? {
        true => Ok(registrar::run(&config)?),
        false => Ok(()),
    }
}

fn run_pool(arguments: &Arguments) -> Result<(), Box<dyn std::error::Error>> {
    let mut config = PoolConfig::load(arguments.config.as_deref())?;
    arguments.apply_overrides(&mut config.listen, &mut config.run_dir, &mut config.log);
    if !arguments.registrar.is_empty() {
        config.registrars.clone_from(&arguments.registrar);
    }
    if let Some(tls) = arguments.tls() {
        config.tls = Some(tls);
    }
    config.announces.trusted |= arguments.announces;
    config.check(arguments.config_source())?;
    match arguments.should_run("pool daemon", &config.log)? {
        true => Ok(pool::run(&config, arguments.with_parent)?),
        false => Ok(()),
    }
}

/// Options that registrars and pool daemons share.
impl Arguments {
    fn apply_overrides(
        &self,
        listen: &mut Vec<IpAddr>,
        run_dir: &mut PathBuf,
        log: &mut LogConfig,
    ) {
        if !self.listen.is_empty() {
            listen.clone_from(&self.listen);
        }
        if let Some(directory) = &self.run_dir {
            run_dir.clone_from(directory);
        }
        if let Some(filter) = &self.log {
            log.filter.clone_from(filter);
        }
    }

    /// Returns the TLS files of a pool daemon; clap ensures that none of the three options is given alone.
    fn tls(&self) -> Option<TlsConfig> {
        Some(TlsConfig {
            ca: self.tls_ca.clone()?,
            cert: self.tls_cert.clone()?,
            key: self.tls_key.clone()?,
            crl: self.tls_crl.clone(),
        })
    }

    /// Returns the source that errors name.
    fn config_source(&self) -> &Path {
        let file = self.config.as_deref();
        file.unwrap_or(Path::new("the command line"))
    }

    /// Returns false if only the configuration was to be checked, and is valid.
    fn should_run(&self, role: &str, log: &LogConfig) -> Result<bool, Box<dyn std::error::Error>> {
        if self.check {
            println!("the {role}'s configuration is valid");
        } else {
            logs::init(log)?;
        }
        Ok(!self.check)
    }
}

fn run_node(arguments: &Arguments) -> Result<(), Box<dyn std::error::Error>> {
    let path = arguments.config.as_deref().unwrap_or(Path::new(CONFIG));
    let config = Config::load(path)?;
    if arguments.check {
        println!(
            "{} is valid: node {} of group {}",
            path.display(),
            config.node.name,
            config.group.name
        );
        return Ok(());
    }
    engine::check_capabilities(&config)?;
    logs::init(&config.log)?;
    // Held until the end, because two daemons would remove each other's filters.
    let _pid_file = PidFile::acquire(&config)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        // Work before a freeze yields between slices, and each time the frames that arrived meanwhile must be seen.
        .event_interval(1)
        .build()?;
    let local = tokio::task::LocalSet::new();
    Ok(local.block_on(&runtime, engine::run_until_signal(config))?)
}
