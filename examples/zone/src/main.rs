//! The zone server of paper 002 section VI C, as an ordinary program: one thread serves clients with epoll, one queries
//! a database in a session, one writes to memory. The program knows nothing of Holdfast.
#![forbid(unsafe_code)]

mod clients;
mod database;
mod memory;
mod status;

use std::net::SocketAddr;
use std::thread::spawn;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Parser;

/// Sends back the clients' data, keeps a database session, and writes to memory continuously.
#[derive(Parser)]
struct Args {
    /// Address for clients.
    #[arg(long)]
    listen: SocketAddr,
    /// Address at which a connection receives the counters, as one line, and is closed.
    #[arg(long)]
    status: SocketAddr,
    /// Address of the database; without it, no session.
    #[arg(long)]
    database: Option<SocketAddr>,
    /// Interval between transactions, in milliseconds.
    #[arg(long, default_value_t = 50)]
    query_every_ms: u64,
    /// Size of the memory, in MiB.
    #[arg(long, default_value_t = 64)]
    memory_mib: usize,
    /// Rate of writing to memory, in MiB per second, in whole pages of 4 KiB: each a random one not yet written in this
    /// round.
    #[arg(long, default_value_t = 0)]
    dirty_mib_per_s: u64,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let clients = clients::Clients::listen(args.listen).context("listen for clients")?;
    // Start the status socket second: when it answers, clients can connect to the other.
    let counts = status::serve(args.status).context("listen for status requests")?;
    let memory = memory::Memory::new(args.memory_mib);
    spawn(move || memory.write_forever(args.dirty_mib_per_s, counts));
    if let Some(address) = args.database {
        let session = database::Session::open(address).context("open the database session")?;
        let pause = Duration::from_millis(args.query_every_ms);
        spawn(move || session.run_transactions(pause, counts));
    }
    clients.serve(counts)
}
