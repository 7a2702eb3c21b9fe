//! The handlespace as paper 001 section 3 has it: sets that are balanced trees, red-black or treap. To compare with, no part of
//! the product.

mod red_black;
pub mod space;
mod treap;

pub use red_black::RedBlack;
pub use treap::Treap;

use std::fmt::Debug;
use std::marker::PhantomData;

/// No node: number 0, whose sum is 0 and which is black.
const NIL: u32 = 0;

/// How a tree is kept balanced.
pub trait Balance: Debug + Default {
    /// A new leaf has been linked.
    fn linked<K>(nodes: &mut Nodes<K>, node: u32);
    /// Takes a node out of the tree.
    fn unlink<K>(nodes: &mut Nodes<K>, node: u32);
    /// What a new node is marked with; `random` is a random number.
    fn mark(random: u32) -> u32;
}

/// An ordered set of keys that stand for something. Each has a weight, and each node the sum of its subtree's (paper 001 section 3.2).
#[derive(Debug)]
pub struct Tree<K, B> {
    nodes: Nodes<K>,
    free: Vec<u32>,
    random: u32,
    balance: PhantomData<B>,
}

/// Nodes by number, and the root.
#[derive(Debug)]
pub struct Nodes<K> {
    nodes: Vec<Node<K>>,
    root: u32,
}

/// A key in its place.
#[derive(Debug)]
pub struct Node<K> {
    /// None in node 0 alone.
    key: Option<K>,
    value: u32,
    weight: u64,
    sum: u64,
    children: [u32; 2],
    parent: u32,
    /// A colour, or a priority.
    mark: u32,
}

impl<K: Copy + Ord, B: Balance> Tree<K, B> {
    /// Empty.
    pub fn new() -> Tree<K, B> {
        Tree {
            nodes: Nodes::new(),
            free: Vec::new(),
            random: 0x9e37_79b9,
            balance: PhantomData,
        }
    }

    /// Adds a key, which is not there yet, and what it stands for. Returns its node, to be named by it until it is removed.
    pub fn insert(&mut self, key: K, value: u32, weight: u64) -> u32 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 17;
        self.random ^= self.random << 5;
        let node = Node {
            key: Some(key),
            value,
            weight,
            sum: weight,
            children: [NIL; 2],
            parent: NIL,
            mark: B::mark(self.random),
        };
        let number = match self.free.pop() {
            Some(number) => {
                self.nodes.nodes[number as usize] = node;
                number
            }
            None => {
                self.nodes.nodes.push(node);
                self.nodes.nodes.len() as u32 - 1
            }
        };
        self.nodes.link(number);
        B::linked(&mut self.nodes, number);
        number
    }

    /// Removes a node.
    pub fn remove(&mut self, node: u32) {
        B::unlink(&mut self.nodes, node);
        self.free.push(node);
    }

    /// The node of a key.
    pub fn find(&self, key: &K) -> Option<u32> {
        let mut at = self.nodes.root;
        while at != NIL {
            match Some(key).cmp(&self.nodes[at].key.as_ref()) {
                std::cmp::Ordering::Less => at = self.nodes[at].children[0],
                std::cmp::Ordering::Greater => at = self.nodes[at].children[1],
                std::cmp::Ordering::Equal => return Some(at),
            }
        }
        None
    }

    /// The key of a node.
    pub fn key(&self, node: u32) -> K {
        let Some(key) = self.nodes[node].key else {
            unreachable!("every node but the one that is none has a key");
        };
        key
    }

    /// What a node's key stands for.
    pub fn value(&self, node: u32) -> u32 {
        self.nodes[node].value
    }

    /// The node of the lowest key.
    pub fn first(&self) -> Option<u32> {
        let root = self.nodes.root;
        (root != NIL).then(|| self.nodes.end(root, 0))
    }

    /// The node of the next key.
    pub fn next(&self, node: u32) -> Option<u32> {
        let right = self.nodes[node].children[1];
        if right != NIL {
            return Some(self.nodes.end(right, 0));
        }
        let mut at = node;
        loop {
            let parent = self.nodes[at].parent;
            if parent == NIL {
                return None;
            }
            if self.nodes[parent].children[0] == at {
                return Some(parent);
            }
            at = parent;
        }
    }

    /// The sum of all weights.
    pub fn total(&self) -> u64 {
        self.nodes[self.nodes.root].sum
    }

    /// The node at whose weight the sum of the weights up to it first exceeds `point`, which is below the total.
    pub fn at(&self, mut point: u64) -> u32 {
        let mut at = self.nodes.root;
        loop {
            let Node {
                children, weight, ..
            } = self.nodes[at];
            let before = self.nodes[children[0]].sum;
            if point < before {
                at = children[0];
            } else if point < before + weight {
                return at;
            } else {
                point -= before + weight;
                at = children[1];
            }
        }
    }

    /// Changes a node's weight.
    pub fn set_weight(&mut self, node: u32, weight: u64) {
        self.nodes[node].weight = weight;
        self.nodes.sum_up(node);
    }
}

impl<K> std::ops::Index<u32> for Nodes<K> {
    type Output = Node<K>;

    fn index(&self, node: u32) -> &Node<K> {
        &self.nodes[node as usize]
    }
}

impl<K> std::ops::IndexMut<u32> for Nodes<K> {
    fn index_mut(&mut self, node: u32) -> &mut Node<K> {
        &mut self.nodes[node as usize]
    }
}

impl<K> Nodes<K> {
    fn new() -> Nodes<K> {
        let none = Node {
            key: None,
            value: 0,
            weight: 0,
            sum: 0,
            children: [NIL; 2],
            parent: NIL,
            mark: 0,
        };
        Nodes {
            nodes: vec![none],
            root: NIL,
        }
    }

    /// Which child of its parent it is.
    fn side(&self, node: u32) -> usize {
        let parent = self[node].parent;
        usize::from(self[parent].children[1] == node)
    }

    /// The last node on one side of a subtree.
    fn end(&self, mut node: u32, side: usize) -> u32 {
        while self[node].children[side] != NIL {
            node = self[node].children[side];
        }
        node
    }

    /// Puts a node into the place of another, without what is below that.
    fn replace(&mut self, node: u32, by: u32) {
        let parent = self[node].parent;
        if parent == NIL {
            self.root = by;
        } else {
            let side = self.side(node);
            self[parent].children[side] = by;
        }
        self[by].parent = parent;
    }

    /// Turns a node down to a side; its child of the other side takes its place.
    fn rotate(&mut self, node: u32, side: usize) {
        let up = self[node].children[1 - side];
        let inner = self[up].children[side];
        self[node].children[1 - side] = inner;
        if inner != NIL {
            self[inner].parent = node;
        }
        self.replace(node, up);
        self[up].children[side] = node;
        self[node].parent = up;
        self[up].sum = self[node].sum;
        self.sum(node);
    }

    fn sum(&mut self, node: u32) {
        let [left, right] = self[node].children;
        self[node].sum = self[node].weight + self[left].sum + self[right].sum;
    }

    /// Corrects the sums from a node up to the root.
    fn sum_up(&mut self, mut node: u32) {
        while node != NIL {
            self.sum(node);
            node = self[node].parent;
        }
    }
}

impl<K: Ord> Nodes<K> {
    /// Makes a node a leaf where its key belongs.
    fn link(&mut self, node: u32) {
        let (mut parent, mut side) = (NIL, 0);
        let mut at = self.root;
        while at != NIL {
            self.nodes[at as usize].sum += self[node].weight;
            parent = at;
            side = usize::from(self[node].key > self[at].key);
            at = self[at].children[side];
        }
        self[node].parent = parent;
        if parent == NIL {
            self.root = node;
        } else {
            self[parent].children[side] = node;
        }
    }
}

#[cfg(test)]
mod tests;
