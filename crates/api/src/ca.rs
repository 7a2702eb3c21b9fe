//! The group's own certificate authority: a directory of files, all mode 0600.
//!
//! | file | content |
//! | --- | --- |
//! | `ca.pem`, `ca.key` | the authority's certificate and private key |
//! | `ca.crl` | its revocation list, empty at first |
//! | `serials.log` | a line for each certificate issued or revoked |
//! | `NODE.pem`, `NODE.key` | a node's certificate and private key |
//!
//! Keys are ECDSA on P-256. A node's certificate carries its identity as the DNS name [`node_dns_name`] and is valid at
//! both ends of a TLS connection. No file is ever overwritten except the revocation list, which is replaced as a whole.
//!
//! Several processes may use an authority, such as a daemon and `holdfast ca`: a lock on `serials.log` (flock(2)) keeps
//! their steps apart.
//!
//! A node that makes its key itself sends a [`CertificateRequest`], and [`CertificateAuthority::sign`] answers it.
//!
//! A certificate also says what its node may be in a group that runs itself: its organizational unit (OU) is the name of a
//! [`NodeRole`]. Certificates of earlier releases have none.

mod certificate_request;
mod pem;

pub use certificate_request::{
    CertificateRequest, NodeKey, REQUEST_BYTES_MAX, RequestError, SignedRequest,
};
pub use pem::{certificate_to_pem, revocation_list_to_pem};

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::net::IpAddr;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rcgen::string::Ia5String;
use rcgen::{
    BasicConstraints, Certificate, CertificateParams, CertificateRevocationListParams, DnType,
    ExtendedKeyUsagePurpose, IsCa, Issuer, KeyIdMethod, KeyPair, KeyUsagePurpose, PublicKeyData,
    RevocationReason, RevokedCertParams, SanType, SerialNumber, date_time_ymd,
};
use rustix::fs::{FlockOperation, flock};
use rustix::io::retry_on_intr;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

const DAY: Duration = Duration::from_secs(24 * 60 * 60);
const AUTHORITY_DAYS: u32 = 3650;
/// Length of the serial numbers that an authority gives.
const SERIAL_BYTES_MAX: usize = 16;

/// Default validity of a node's certificate, in days.
pub const NODE_DAYS: u32 = 825;

/// Default validity of a certificate that the daemon signs for a node and renews, in days.
pub const RENEWED_DAYS: u32 = 90;

/// Maximum lag of a node's clock behind the authority's.
const CLOCK_TOLERANCE: Duration = DAY;

/// The role that a certificate admits its node to, in a group that runs itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum NodeRole {
    /// The node may be a backup, and thus decide on the group's views and become contact node.
    Backup,
    /// The node only serves.
    Server,
}

impl NodeRole {
    /// Returns the organizational unit in the certificates of such nodes.
    pub fn unit(self) -> &'static str {
        match self {
            NodeRole::Backup => "Holdfast backup",
            NodeRole::Server => "Holdfast server node",
        }
    }

    /// Returns the role that organizational units of a certificate name; none if they name no role, or both.
    pub fn from_units<'a>(units: impl Iterator<Item = &'a str>) -> Option<NodeRole> {
        let role_of = |unit| {
            let mut all = [NodeRole::Backup, NodeRole::Server].into_iter();
            all.find(|role| role.unit() == unit)
        };
        let mut roles = units.filter_map(role_of);
        let first = roles.next()?;
        roles.all(|role| role == first).then_some(first)
    }
}

/// The terms on which a certificate is issued. A number of days alone stands for the certificate of a backup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CertificateTerms {
    /// Days of validity.
    pub days: u32,
    /// The role that the certificate names; none for a renewal of a certificate that names none.
    pub role: Option<NodeRole>,
}

impl From<u32> for CertificateTerms {
    fn from(days: u32) -> CertificateTerms {
        CertificateTerms {
            days,
            role: Some(NodeRole::Backup),
        }
    }
}

/// Returns the DNS name of node `name` in its certificate: `NAME.node`.
pub fn node_dns_name(name: &str) -> String {
    format!("{name}.node")
}

/// An error of the certificate authority.
#[derive(Debug, thiserror::Error)]
pub enum CaError {
    /// A file exists that must not be overwritten.
    #[error("{} exists already and is not overwritten; move it away or use another directory", .0.display())]
    Exists(PathBuf),
    /// A file cannot be read or written.
    #[error("{}: {error}", .path.display())]
    File {
        /// File that cannot be read or written.
        path: PathBuf,
        /// The system's error.
        error: io::Error,
    },
    /// The name is not allowed for a node or group.
    #[error("`{0}` is not a name; use 1 to 40 lower-case letters, digits and inner hyphens")]
    Name(String),
    /// The node has no valid certificate to revoke.
    #[error("no certificate of `{0}` is in force; serials.log lists what was issued")]
    NotIssued(String),
    /// A node with this name has a valid certificate: a second host would take its name.
    #[error(
        "a certificate of `{0}` is in force; choose another name, or revoke it first with `holdfast ca revoke {0}`"
    )]
    InForce(String),
    /// The certificate is revoked, so that it is not renewed.
    #[error(
        "a certificate of `{0}` is revoked and is not renewed; let the host join with a new token"
    )]
    Revoked(String),
    /// A certificate request is refused.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// A line of the log is malformed or cut.
    #[error("{}:{line}: not a whole line of the log; restore the file, or remove the line if a crash has cut it", .path.display())]
    Log {
        /// Path of the log of issued certificates, `serials.log`.
        path: PathBuf,
        /// Number of the damaged line, from 1.
        line: usize,
    },
    /// Creating or reading a certificate failed.
    #[error("certificate: {0}")]
    Certificate(rcgen::Error),
}

/// The text names the error, which is no source of its own: a command that prints the sources too would print the text
/// twice.
impl From<rcgen::Error> for CaError {
    fn from(error: rcgen::Error) -> CaError {
        CaError::Certificate(error)
    }
}

/// Files of a certificate just issued.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IssuedFiles {
    /// The certificate (PEM).
    pub cert: PathBuf,
    /// The private key (PEM).
    pub key: PathBuf,
    /// The certificate's serial number in hexadecimal.
    pub serial: String,
}

/// A certificate that was signed for a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SignedCertificate {
    /// The certificate in PEM.
    pub pem: String,
    /// The certificate in DER.
    pub der: Vec<u8>,
    /// The serial number in hexadecimal.
    pub serial: String,
}

/// A certificate in the authority's log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoggedCertificate {
    /// The serial number.
    pub serial: u128,
    /// True if the certificate is revoked.
    pub is_revoked: bool,
}

/// A certificate authority that can issue and revoke certificates.
pub struct CertificateAuthority {
    dir: PathBuf,
    issuer: Issuer<'static, KeyPair>,
}

impl CertificateAuthority {
    /// Creates an authority for the group `group` in `dir`, which is created if necessary.
    ///
    /// # Errors
    /// `dir` holds an authority already, cannot be written, or `group` is not a name.
    pub fn init(dir: &Path, group: &str) -> Result<CertificateAuthority, CaError> {
        check_name(group)?;
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(dir)
            .map_err(file_error(dir))?;
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::default();
        params
            .distinguished_name
            .push(DnType::CommonName, format!("Holdfast group {group}"));
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params.serial_number = Some(serial_number(random_serial()?));
        set_validity(&mut params, AUTHORITY_DAYS);
        let certificate = params.self_signed(&key)?;
        // Create the key first: the process that creates the key is the one that writes the rest.
        create_file(&dir.join("ca.key"), &key.serialize_pem())?;
        create_file(&dir.join("ca.pem"), &certificate.pem())?;
        create_file(&dir.join("serials.log"), "")?;
        let authority = CertificateAuthority {
            dir: dir.to_owned(),
            issuer: Issuer::new(params, key),
        };
        authority.write_crl(&[])?;
        Ok(authority)
    }

    /// Opens the authority in `dir`.
    ///
    /// # Errors
    /// Its files are missing or damaged.
    pub fn open(dir: &Path) -> Result<CertificateAuthority, CaError> {
        let key = KeyPair::from_pem(&read(&dir.join("ca.key"))?)?;
        let certificate = read(&dir.join("ca.pem"))?;
        Ok(CertificateAuthority {
            dir: dir.to_owned(),
            issuer: Issuer::from_ca_cert_pem(&certificate, key)?,
        })
    }

    /// Issues a certificate for node `node` on these terms; `addresses` are added to its names.
    ///
    /// # Errors
    /// `node` is not a name, or its files exist already (revoke moves them aside).
    pub fn issue(
        &self,
        node: &str,
        addresses: &[IpAddr],
        terms: impl Into<CertificateTerms>,
    ) -> Result<IssuedFiles, CaError> {
        check_name(node)?;
        let terms = terms.into();
        let key = KeyPair::generate()?;
        let serial = random_serial()?;
        let certificate = self.certify(node, &key, addresses, terms, serial)?;
        let issued = IssuedFiles {
            cert: self.dir.join(format!("{node}.pem")),
            key: self.dir.join(format!("{node}.key")),
            serial: serial_text(serial),
        };
        if issued.cert.exists() {
            return Err(CaError::Exists(issued.cert));
        }
        let mut log = self.lock_log()?;
        create_file(&issued.key, &key.serialize_pem())?;
        // Log before the certificate can be used, so that every used certificate can be revoked.
        log.add_issued(serial, node, terms.days)?;
        create_file(&issued.cert, &certificate.pem())?;
        Ok(issued)
    }

    /// Signs a certificate for the name and key of `request` on these terms. The log has it before this function
    /// returns. Whether the name is free is the caller's question ([`CertificateAuthority::check_free`]).
    ///
    /// # Errors
    /// The log is damaged, or cannot be written.
    pub fn sign(
        &self,
        request: &CertificateRequest,
        terms: impl Into<CertificateTerms>,
    ) -> Result<SignedCertificate, CaError> {
        self.sign_with_serial(request, terms, random_serial()?)
    }

    /// Does the same as [`CertificateAuthority::sign`] with a serial number that [`random_serial`] returned.
    ///
    /// # Errors
    /// As [`CertificateAuthority::sign`].
    pub fn sign_with_serial(
        &self,
        request: &CertificateRequest,
        terms: impl Into<CertificateTerms>,
        serial: u128,
    ) -> Result<SignedCertificate, CaError> {
        self.sign_in(&mut self.lock_log()?, request, terms.into(), serial)
    }

    /// Signs a certificate that takes the place of the one with the serial number `present`.
    ///
    /// # Errors
    /// [`CaError::Revoked`]: a revocation that other nodes do not know yet holds here. Otherwise as
    /// [`CertificateAuthority::sign`].
    pub fn renew(
        &self,
        request: &CertificateRequest,
        terms: impl Into<CertificateTerms>,
        present: u128,
    ) -> Result<SignedCertificate, CaError> {
        let mut log = self.lock_log()?;
        match is_revoked(&log.entries, present) {
            true => Err(CaError::Revoked(request.name().to_owned())),
            false => self.sign_in(&mut log, request, terms.into(), random_serial()?),
        }
    }

    fn sign_in(
        &self,
        log: &mut LockedLog,
        request: &CertificateRequest,
        terms: CertificateTerms,
        serial: u128,
    ) -> Result<SignedCertificate, CaError> {
        let name = request.name();
        let certificate = self.certify(name, &request.public_key, &[], terms, serial)?;
        log.add_issued(serial, name, terms.days)?;
        Ok(SignedCertificate {
            pem: certificate.pem(),
            der: certificate.der().to_vec(),
            serial: serial_text(serial),
        })
    }

    /// Returns the certificates of `node` that have not ended, revoked ones included, in the order of the log.
    ///
    /// # Errors
    /// The log cannot be read, or is damaged.
    pub fn certificates_of(&self, node: &str) -> Result<Vec<LoggedCertificate>, CaError> {
        check_name(node)?;
        let log = self.lock_log()?.entries;
        let certificate = |entry: &LogEntry| LoggedCertificate {
            serial: entry.number(),
            is_revoked: is_revoked(&log, entry.number()),
        };
        Ok(issued_to(&log, node).map(certificate).collect())
    }

    /// Checks that no certificate of `node` is in force.
    ///
    /// # Errors
    /// [`CaError::InForce`], or the log cannot be read.
    pub fn check_free(&self, node: &str) -> Result<(), CaError> {
        let certificates = self.certificates_of(node)?;
        match certificates.iter().all(|known| known.is_revoked) {
            true => Ok(()),
            false => Err(CaError::InForce(node.to_owned())),
        }
    }

    /// Returns the authority's certificate in PEM.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn certificate_pem(&self) -> Result<String, CaError> {
        read(&self.dir.join("ca.pem"))
    }

    /// Returns the revocation list in PEM.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn revocations_pem(&self) -> Result<String, CaError> {
        read(&self.dir.join("ca.crl"))
    }

    fn certify(
        &self,
        node: &str,
        key: &impl PublicKeyData,
        addresses: &[IpAddr],
        terms: CertificateTerms,
        serial: u128,
    ) -> Result<Certificate, CaError> {
        let mut params = CertificateParams::default();
        params
            .distinguished_name
            .push(DnType::CommonName, format!("node:{node}"));
        if let Some(role) = terms.role {
            params
                .distinguished_name
                .push(DnType::OrganizationalUnitName, role.unit());
        }
        let dns_name = Ia5String::try_from(node_dns_name(node))?;
        params.subject_alt_names = vec![SanType::DnsName(dns_name)];
        let ips = addresses.iter().copied().map(SanType::IpAddress);
        params.subject_alt_names.extend(ips);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![
            ExtendedKeyUsagePurpose::ServerAuth,
            ExtendedKeyUsagePurpose::ClientAuth,
        ];
        params.use_authority_key_identifier_extension = true;
        params.serial_number = Some(serial_number(serial));
        set_validity(&mut params, terms.days);
        Ok(params.signed_by(key, &self.issuer)?)
    }

    /// Revokes every valid certificate of `node`: the revocation list is replaced, and the node's files are renamed
    /// (`NODE.revoked-SERIAL.pem`, `.key`) if this directory has them. Returns the serial numbers.
    ///
    /// # Errors
    /// No certificate of `node` is valid, or a file cannot be written.
    pub fn revoke(&self, node: &str) -> Result<Vec<String>, CaError> {
        check_name(node)?;
        // Held until the list is written, so that no certificate of the node is renewed in between.
        let mut log = self.lock_log()?;
        let serials: Vec<String> = issued_to(&log.entries, node)
            .filter(|entry| !is_revoked(&log.entries, entry.number()))
            .map(|entry| entry.serial.clone())
            .collect();
        let Some(last) = serials.last() else {
            return Err(CaError::NotIssued(node.to_owned()));
        };
        for serial in &serials {
            log.add_revoked(serial, node)?;
        }
        self.write_crl(&log.entries)?;
        for extension in ["pem", "key"] {
            let from = self.dir.join(format!("{node}.{extension}"));
            let to = self.dir.join(format!("{node}.revoked-{last}.{extension}"));
            match fs::rename(&from, &to) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(file_error(&from)(error));
                }
                _ => {}
            }
        }
        Ok(serials)
    }

    /// Replaces the revocation list by one with all revocations in `log`.
    fn write_crl(&self, log: &[LogEntry]) -> Result<(), CaError> {
        let revocations: Vec<&LogEntry> = log.iter().filter(|entry| entry.is_revocation).collect();
        // A certificate that has ended is refused anyway.
        let is_listed = |entry: &&&LogEntry| {
            let issued = log.iter().find(|other| other.serial == entry.serial);
            !issued.is_some_and(LogEntry::has_ended)
        };
        let revoked: Vec<RevokedCertParams> = revocations
            .iter()
            .filter(is_listed)
            .map(|entry| RevokedCertParams {
                serial_number: SerialNumber::from_slice(&entry.serial_bytes),
                revocation_time: date_time_ymd(1970, 1, 1) + entry.time,
                reason_code: Some(RevocationReason::Unspecified),
                invalidity_date: None,
            })
            .collect();
        let now = since_epoch();
        let params = CertificateRevocationListParams {
            this_update: date_time_ymd(1970, 1, 1) + now.saturating_sub(CLOCK_TOLERANCE),
            next_update: date_time_ymd(1970, 1, 1) + now + DAY * AUTHORITY_DAYS,
            crl_number: SerialNumber::from_slice(&(1 + revocations.len() as u64).to_be_bytes()),
            issuing_distribution_point: None,
            revoked_certs: revoked,
            key_identifier_method: KeyIdMethod::Sha256,
        };
        let path = self.dir.join("ca.crl");
        let partial = self.dir.join("ca.crl.partial");
        let pem = params.signed_by(&self.issuer)?.pem()?;
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(0o600);
        let written = options.open(&partial).and_then(|mut file| {
            file.write_all(pem.as_bytes())?;
            file.sync_all()
        });
        written
            .and_then(|()| fs::rename(&partial, &path))
            .map_err(file_error(&path))
    }

    /// Waits for the lock on the log, and reads the log.
    fn lock_log(&self) -> Result<LockedLog, CaError> {
        let path = self.dir.join("serials.log");
        let mut text = String::new();
        let file = OpenOptions::new()
            .read(true)
            .append(true)
            .open(&path)
            .and_then(|mut file| {
                retry_on_intr(|| flock(&file, FlockOperation::LockExclusive))?;
                file.read_to_string(&mut text)?;
                Ok(file)
            })
            .map_err(file_error(&path))?;
        let parse = |(number, line): (usize, &str)| {
            let whole_line = line.strip_suffix('\n');
            whole_line
                .and_then(LogEntry::parse)
                .ok_or_else(|| CaError::Log {
                    path: path.clone(),
                    line: number + 1,
                })
        };
        let entries = text.split_inclusive('\n').enumerate().map(parse);
        Ok(LockedLog {
            entries: entries.collect::<Result<_, _>>()?,
            file,
            path,
        })
    }
}

/// The log, whole, and locked until the value is dropped.
struct LockedLog {
    entries: Vec<LogEntry>,
    file: File,
    path: PathBuf,
}

impl LockedLog {
    fn add_issued(&mut self, serial: u128, node: &str, days: u32) -> Result<(), CaError> {
        let now = since_epoch();
        let end = now + DAY * days;
        self.append(&format!(
            "issued {} {node} {} {}",
            serial_text(serial),
            now.as_secs(),
            end.as_secs()
        ))
    }

    fn add_revoked(&mut self, serial: &str, node: &str) -> Result<(), CaError> {
        let now = since_epoch().as_secs();
        self.append(&format!("revoked {serial} {node} {now}"))
    }

    fn append(&mut self, line: &str) -> Result<(), CaError> {
        let error = file_error(&self.path);
        let length = self.file.metadata().map_err(&error)?.len();
        let written = (self.file)
            .write_all(format!("{line}\n").as_bytes())
            .and_then(|()| self.file.sync_all());
        if written.is_err() {
            // A part of a line would make the log unusable. The error of the write counts.
            let _ = self.file.set_len(length);
        }
        written.map_err(error)?;
        self.entries.extend(LogEntry::parse(line));
        Ok(())
    }
}

/// A line of the log: `issued SERIAL NODE SECONDS END_SECONDS` (earlier releases wrote no end) or `revoked SERIAL NODE
/// SECONDS`. Times count from 1970.
struct LogEntry {
    is_revocation: bool,
    serial: String,
    serial_bytes: Vec<u8>,
    node: String,
    time: Duration,
    end: Option<Duration>,
}

/// Returns the certificates of `node` that have not ended, in the order of the log.
fn issued_to<'log>(log: &'log [LogEntry], node: &str) -> impl Iterator<Item = &'log LogEntry> {
    log.iter()
        .filter(move |entry| entry.node == node && !entry.is_revocation && !entry.has_ended())
}

/// Returns true if the log has a revocation of the certificate with this serial number.
fn is_revoked(log: &[LogEntry], serial: u128) -> bool {
    log.iter()
        .any(|entry| entry.is_revocation && entry.number() == serial)
}

impl LogEntry {
    fn parse(line: &str) -> Option<LogEntry> {
        let mut fields = line.split(' ');
        let is_revocation = match fields.next()? {
            "issued" => false,
            "revoked" => true,
            _ => return None,
        };
        let serial = fields.next()?.to_owned();
        let entry = LogEntry {
            is_revocation,
            serial_bytes: unhex(&serial).filter(|bytes| bytes.len() <= SERIAL_BYTES_MAX)?,
            serial,
            node: fields.next()?.to_owned(),
            time: Duration::from_secs(fields.next()?.parse().ok()?),
            end: match fields.next() {
                Some(end) if !is_revocation => Some(Duration::from_secs(end.parse().ok()?)),
                Some(_) => return None,
                None => None,
            },
        };
        fields.next().is_none().then_some(entry)
    }

    /// Returns the serial number.
    fn number(&self) -> u128 {
        let bytes = self.serial_bytes.iter();
        bytes.fold(0, |number, byte| number << 8 | u128::from(*byte))
    }

    /// Returns true if the certificate has ended for every clock within the tolerance.
    fn has_ended(&self) -> bool {
        self.end
            .is_some_and(|end| end + CLOCK_TOLERANCE < since_epoch())
    }
}

/// Returns a random serial number, positive and of fixed length (RFC 5280, 4.1.2.2).
///
/// # Errors
/// The system gives no random numbers.
pub fn random_serial() -> Result<u128, CaError> {
    let mut bytes = [0; SERIAL_BYTES_MAX];
    random_bytes(&mut bytes).map_err(file_error(Path::new(RANDOM_DEVICE)))?;
    bytes[0] = bytes[0] & 0x7f | 0x40;
    Ok(u128::from_be_bytes(bytes))
}

fn serial_number(serial: u128) -> SerialNumber {
    SerialNumber::from_slice(&serial.to_be_bytes())
}

fn serial_text(serial: u128) -> String {
    format!("{serial:032x}")
}

const RANDOM_DEVICE: &str = "/dev/urandom";

/// Fills `bytes` with random numbers of the system.
pub(crate) fn random_bytes(bytes: &mut [u8]) -> io::Result<()> {
    File::open(RANDOM_DEVICE)?.read_exact(bytes)
}

fn set_validity(params: &mut CertificateParams, days: u32) {
    let now = date_time_ymd(1970, 1, 1) + since_epoch();
    params.not_before = now - CLOCK_TOLERANCE;
    params.not_after = now + DAY * days;
}

fn since_epoch() -> Duration {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
}

/// Checks that a name is one label of a domain name (the daemon's configuration has the same rule).
///
/// # Errors
/// [`CaError::Name`].
pub fn check_name(name: &str) -> Result<(), CaError> {
    let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let outside = name.starts_with('-') || name.ends_with('-');
    // A node named `ca` would collide with the authority's files.
    if name.is_empty() || name.len() > 40 || !name.chars().all(allowed) || outside || name == "ca" {
        return Err(CaError::Name(name.to_owned()));
    }
    Ok(())
}

/// Writes a new file of mode 0600 and makes it durable.
fn create_file(path: &Path, content: &str) -> Result<(), CaError> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true).mode(0o600);
    let mut file: File = options.open(path).map_err(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => CaError::Exists(path.to_owned()),
        _ => file_error(path)(error),
    })?;
    file.write_all(content.as_bytes())
        .and_then(|()| file.sync_all())
        .map_err(file_error(path))
}

fn read(path: &Path) -> Result<String, CaError> {
    fs::read_to_string(path).map_err(file_error(path))
}

fn file_error(path: &Path) -> impl Fn(io::Error) -> CaError {
    let path = path.to_owned();
    move |error| CaError::File {
        path: path.clone(),
        error,
    }
}

fn unhex(text: &str) -> Option<Vec<u8>> {
    if !text.len().is_multiple_of(2) || !text.is_ascii() {
        return None;
    }
    (0..text.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&text[at..at + 2], 16).ok())
        .collect()
}
