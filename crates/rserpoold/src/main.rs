//! `rserpoold`: a registrar, or a pool daemon.
#![forbid(unsafe_code)]

use std::error::Error;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use holdfast_daemon::config::{LogConfig, TlsConfig};
use holdfast_daemon::exit_code::DaemonExitCode;
use holdfast_daemon::start_check::StartCheck;
use holdfast_daemon::{logs, service_manager};
use holdfast_rserpoold::config::pool::{PoolConfig, RegistrarAddress};
use holdfast_rserpoold::config::registrar::{RegistrarConfig, RegistrarPeer};
use holdfast_rserpoold::{pool, registrar};

/// The daemon of Reliable Server Pooling (RFC 5351).
#[derive(Parser)]
#[command(
    name = "rserpoold",
    version,
    after_help = "Examples:\n  rserpoold registrar\n  rserpoold pool --registrar 10.0.0.2"
)]
struct CommandLine {
    #[command(subcommand)]
    role: Role,
}

#[derive(Subcommand)]
enum Role {
    /// Run a registrar, which keeps the elements of the scope's pools.
    Registrar(RegistrarArguments),
    /// Run a pool daemon, which communicates with registrars for the programs of its host.
    Pool(PoolArguments),
}

#[derive(Args)]
struct RegistrarArguments {
    #[command(flatten)]
    common: CommonArguments,
    /// Another registrar to contact at the start, in addition to the registrars in the file; may be repeated.
    #[arg(long, value_name = "ADDRESS[:PORT]", value_parser = RegistrarPeer::parse)]
    peer: Vec<RegistrarPeer>,
}

#[derive(Args)]
struct PoolArguments {
    #[command(flatten)]
    common: CommonArguments,
    #[arg(
        long,
        value_name = "REGISTRAR",
        help = "Registrar, instead of the file's registrars; may be repeated. Written as ADDRESS[:PORT], \
                tcp://ADDRESS[:PORT] or tls://[NAME@]ADDRESS[:PORT]"
    )]
    registrar: Vec<RegistrarAddress>,
    /// The group's authority, for registrars over TLS; with --tls-cert and --tls-key instead of the file's section
    /// `tls`.
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
    /// Trust registrars that announce themselves by multicast.
    #[arg(long)]
    announces: bool,
    /// End when standard input ends.
    #[arg(long)]
    with_parent: bool,
}

/// Options of both roles.
#[derive(Args)]
struct CommonArguments {
    /// Configuration file; every key has a default.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Only check that a start would succeed; change nothing.
    #[arg(long)]
    check: bool,
    /// Address of the daemon, instead of the file's addresses; may be repeated.
    #[arg(long, value_name = "ADDRESS")]
    listen: Vec<IpAddr>,
    /// Directory of the daemon's sockets, instead of the file's.
    #[arg(long, value_name = "DIRECTORY")]
    run_dir: Option<PathBuf>,
    /// Log filter, such as `warn`, instead of the file's.
    #[arg(long, value_name = "FILTER")]
    log: Option<String>,
}

fn main() -> ExitCode {
    let ended = match CommandLine::parse().role {
        Role::Registrar(arguments) => run_registrar(&arguments),
        Role::Pool(arguments) => run_pool(&arguments),
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("rserpoold: {error}");
            service_manager::report_failure(&error.to_string());
            DaemonExitCode::of(error.as_ref()).into()
        }
    }
}

fn run_registrar(arguments: &RegistrarArguments) -> Result<(), Box<dyn Error>> {
    let common = &arguments.common;
    let mut config = RegistrarConfig::load(common.config.as_deref())?;
    common.apply_overrides(&mut config.listen, &mut config.run_dir, &mut config.log);
    config.peers.extend_from_slice(&arguments.peer);
    config.check(common.config_source())?;
    let check = registrar::examine_start(&config);
    match common.should_run("registrar", check, &config.log)? {
        true => Ok(registrar::run(&config)?),
        false => Ok(()),
    }
}

fn run_pool(arguments: &PoolArguments) -> Result<(), Box<dyn Error>> {
    let common = &arguments.common;
    let mut config = PoolConfig::load(common.config.as_deref())?;
    common.apply_overrides(&mut config.listen, &mut config.run_dir, &mut config.log);
    if !arguments.registrar.is_empty() {
        config.registrars.clone_from(&arguments.registrar);
    }
    if let Some(tls) = arguments.tls() {
        config.tls = Some(tls);
    }
    config.announces.trusted |= arguments.announces;
    config.check(common.config_source())?;
    let check = pool::examine_start(&config);
    match common.should_run("pool daemon", check, &config.log)? {
        true => Ok(pool::run(&config, arguments.with_parent)?),
        false => Ok(()),
    }
}

impl PoolArguments {
    /// Returns the TLS files; clap ensures that none of the three options is given alone.
    fn tls(&self) -> Option<TlsConfig> {
        Some(TlsConfig {
            ca: self.tls_ca.clone()?,
            cert: self.tls_cert.clone()?,
            key: self.tls_key.clone()?,
            crl: self.tls_crl.clone(),
        })
    }
}

impl CommonArguments {
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

    /// Returns the source that errors name.
    fn config_source(&self) -> &Path {
        let file = self.config.as_deref();
        file.unwrap_or(Path::new("the command line"))
    }

    /// Returns false if a start was only to be checked, and would succeed.
    fn should_run(
        &self,
        role: &str,
        mut check: StartCheck,
        log: &LogConfig,
    ) -> Result<bool, Box<dyn Error>> {
        if self.check {
            check.log(log);
            check.finish()?;
            println!("the {role}'s configuration is valid, and a start would succeed");
        } else {
            logs::init(log)?;
            check.finish_for_start()?;
        }
        Ok(!self.check)
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn manual_page_names_every_option() {
        let page = include_str!("../../../packaging/man/rserpoold.8").replace('\\', "");
        for role in CommandLine::command().get_subcommands() {
            for argument in role.get_arguments() {
                let name = argument.get_long().expect("an option");
                assert!(page.contains(&format!("--{name}")), "--{name} is missing");
            }
        }
    }
}
