"""What is asked where nobody says what a model is used for: texts of several kinds, to be continued."""

PROMPTS = (
    "Once upon a time there was a small village at the foot of a mountain, and in it lived",
    "def fibonacci(n):\n    ",
    "The three most important causes of the war were",
    "Q: A train leaves at 9:40 and arrives at 11:05. How long does it take?\nA:",
    "Dear Ms. Alvarez,\n\nthank you for your letter of the 3rd. We are sorry to hear that",
    "Translate to French: The weather is beautiful today, and we are going to the sea.\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "Summarise in one sentence: The committee met on Tuesday and could not agree on a date for the next election, so",
    "Ingredients: two eggs, a cup of flour, a pinch of salt. Method:",
    "The mitochondria of a cell are the place where",
    "Q: If all birds can fly and a penguin is a bird, what follows, and what is wrong with it?\nA:",
    "SELECT name, COUNT(*) FROM orders",
    "Breaking news: scientists announced on Friday that",
    "User: My printer does not print any more. What can I do?\nAssistant:",
    "Let x be a real number with x^2 = 2. Then x is not rational, because",
    "In the beginning of the nineteenth century the city of London had",
)
